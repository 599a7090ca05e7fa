"""Losses at OpenImages size, forward and backward on one thread, against torch's fused binary cross-entropy.

Ratios (the loss's time ÷ binary cross-entropy's; both start from float32 logits and the batch's int8 labels):
  csl_vs_bce          selective with the K likeliest unknown entries of each image ignored (the paper)
  csl_batch_vs_bce    with the K·B likeliest of the batch ignored (the released code)
  csl_vs_float_bce    the first again, against cross-entropy whose float32 targets are ready made
  selection_vs_bce    `selection` on logits of a trained model, about 8 expected positives per image
  selection_wide_vs_bce   the same on the logits of the other measurements, hundreds of expected positives per image
  topk_vs_ours        torch.topk's time ÷ ours for choosing the K likeliest alone
`selection` in the JSON: its nodes, and its largest error of ln P against 256 nodes in float64 on both kinds of logits.
Times are of this thread's work on the CPU, the best of many alternating repeats: waiting for other programs does not
count, and what they push out of caches can only add.
`differences`, each 0: between the gradients of the two cross-entropies (largest), and the number of entries that only
one of our selection and torch.topk's has.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.batch import Batch
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Method, Outputs, Step, Task, positive
from lacuna.trainer.methods.selection.hidden import NODES
from lacuna.trainer.methods.selection.likelihood import fixed
from lacuna.trainer.methods.top_entries import top_entries
from lacuna.trainer.world import World

# The paper's OpenImages settings.
_CSL = {"name": "csl", "gamma_positive": 1, "gamma_negative": 2, "gamma_unknown": 7}
_ANNOTATED = 10  # known entries of an image, half of them positive
_EXPECTED = 8  # positives per image that a trained model expects
_MANY, _CHECKED = 256, 8  # nodes of the exact likelihood, and rows that are compared with it


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=64, help="images (default 64)")
    parser.add_argument("--classes", type=int, default=9600, help="classes (default 9600)")
    parser.add_argument("--top", type=int, default=200, help="K, entries ignored per image (default 200)")
    parser.add_argument("--repeats", type=int, help="of each measurement (default 400, quick: 100)")


def run(quick: bool, args: argparse.Namespace) -> dict:
    repeats = args.repeats or (100 if quick else 400)
    for flag in ("batch", "classes", "top"):
        if getattr(args, flag) < 1:
            raise UserError(f"--{flag} {getattr(args, flag)}: give a number above 0.")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        logits, labels = draw(args.batch, args.classes)
        subjects = calls(logits, labels, args.top)
        times = measure(subjects, repeats)
        differences = compare(subjects)
        errors = {kind: selection_error(values, labels) for kind, values in logits.items()}
    finally:
        torch.set_num_threads(before)
    for name, seconds in times.items():
        print(f"{name:<14} {seconds * 1e3:7.2f} ms", flush=True)
    return {
        "ratios": {
            "csl_vs_bce": round(times["csl"] / times["bce"], 2),
            "csl_batch_vs_bce": round(times["csl_batch"] / times["bce"], 2),
            "csl_vs_float_bce": round(times["csl"] / times["float_bce"], 2),
            "selection_vs_bce": round(times["selection"] / times["bce"], 2),
            "selection_wide_vs_bce": round(times["selection_wide"] / times["bce"], 2),
            "topk_vs_ours": round(times["topk"] / times["ours"], 2),
        },
        "differences": differences,
        "selection": {"nodes": NODES, "error": errors["trained"], "error_wide": errors["wide"],
                      "expected_positives": round(float(torch.sigmoid(logits["trained"]).sum(1).mean()), 2),
                      "expected_positives_wide": round(float(torch.sigmoid(logits["wide"]).sum(1).mean()), 2)},
        "milliseconds": {name: round(seconds * 1e3, 3) for name, seconds in times.items()},
        "batch": args.batch, "classes": args.classes, "top": args.top, "repeats": repeats, "threads": 1,
    }


def compare(subjects: dict[str, Callable[[], torch.Tensor]]) -> dict[str, float]:
    chosen = []
    for name in ("topk", "ours"):
        columns = subjects[name]()
        chosen.append({(row, int(c)) for row, line in enumerate(columns) for c in line})
    return {"bce_gradients": float((subjects["bce"]() - subjects["float_bce"]()).abs().max()),
            "selected_entries": len(chosen[0] ^ chosen[1])}


def calls(logits: dict[str, torch.Tensor], labels: torch.Tensor, top: int) -> dict[str, Callable[[], torch.Tensor]]:
    """What is measured, by name: gradients of a loss, or the selected columns of each row."""
    rows, classes = labels.shape
    wide = logits["wide"]
    shards = np.zeros(rows, np.int64)
    batch = Batch(wide, labels, shards, np.arange(rows), torch.zeros(rows, 4),
                  torch.zeros(rows, dtype=torch.bool), shards)
    counts = np.zeros(classes, np.int64)
    task = Task(classes, rows, counts, counts, fully_annotated=False)
    step = Step(_world_of_one(), rows, 0, 1)
    targets = positive(labels).float()

    def cross_entropy(make_targets: Callable[[], torch.Tensor]) -> torch.Tensor:
        leaf = wide.clone().requires_grad_()
        F.binary_cross_entropy_with_logits(leaf, make_targets()).backward()
        return gradient(leaf)

    def ours(method: Method, logits: torch.Tensor = wide) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        (method.loss(Outputs(leaf), batch, step).per_sample.sum() / step.samples).backward()
        return gradient(leaf)

    def gradient(leaf: torch.Tensor) -> torch.Tensor:
        assert leaf.grad is not None
        return leaf.grad

    per_image = build_method({**_CSL, "top": top}, task)
    of_batch = build_method({**_CSL, "top": top, "budget": "batch"}, task)
    selection = build_method({"name": "selection"}, task)
    return {
        "bce": lambda: cross_entropy(lambda: positive(labels).float()),
        "float_bce": lambda: cross_entropy(lambda: targets),
        "csl": lambda: ours(per_image),
        "csl_batch": lambda: ours(of_batch),
        "selection": lambda: ours(selection, logits["trained"]),
        "selection_wide": lambda: ours(selection),
        "topk": lambda: torch.topk(wide, min(top, classes), sorted=False).indices,
        "ours": lambda: top_entries(wide, top)[1],
    }


def draw(rows: int, classes: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(logits [rows, classes] by kind, labels): `wide` ones, and the same shifted to Σp ≈ 8 per image."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(rows, classes, generator=generator) * 2 - 4
    low, high = -40.0, 40.0
    for _ in range(40):
        shift = (low + high) / 2
        many = float(torch.sigmoid(wide + shift).sum(1).mean()) > min(_EXPECTED, classes / 2)
        low, high = (low, shift) if many else (shift, high)
    labels = torch.full((rows, classes), UNKNOWN, dtype=torch.int8)
    known = torch.randint(classes, (rows, _ANNOTATED), generator=generator)
    labels.scatter_(1, known[:, ::2], POSITIVE).scatter_(1, known[:, 1::2], NEGATIVE)
    return {"wide": wide, "trained": wide + shift}, labels


def selection_error(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """The largest |Δ ln P| of some rows against many nodes in float64, the integral as it is written down."""
    x, w = np.polynomial.legendre.leggauss(_MANY)
    s, weights = torch.from_numpy((x + 1) / 2), torch.from_numpy(w / 2)
    errors = []
    for a, z in zip(logits[:_CHECKED].double(), labels[:_CHECKED], strict=True):
        shown, hidden = z == POSITIVE, z == UNKNOWN
        m = int(shown.sum())
        inside = torch.log1p(-torch.sigmoid(a[hidden]) * s[:, None]).sum(1) + (m - 1) * torch.log(s)
        known = F.logsigmoid(a[shown]).sum() + F.logsigmoid(-a[z == NEGATIVE]).sum()
        exact = known + (torch.logsumexp(torch.log(m * weights) + inside, 0) if m else 0)
        errors.append(abs(float(exact + fixed(a.float()[None], z[None]).surprise)))
    return max(errors)


def measure(subjects: dict[str, Callable[[], torch.Tensor]], repeats: int) -> dict[str, float]:
    """CPU seconds of the fastest call of each; they take turns, so that a busy machine slows them all."""
    best = dict.fromkeys(subjects, float("inf"))
    for repeat in range(repeats + 3):
        for name, call in subjects.items():
            start = time.thread_time()
            call()
            if repeat >= 3:  # the first ones warm up caches and the allocator
                best[name] = min(best[name], time.thread_time() - start)
    return best


def _world_of_one() -> World:
    """The real thing, over an in-memory store."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return World(torch.device("cpu"), 60)
