"""Makes a model folder from a checkpoint: safetensors, labels.json (names, thresholds, preprocessing) and ONNX.

  lacuna export runs/my-run --out model                          the run's best checkpoint
  lacuna export runs/my-run --out model --val shards/coco14/val  with a threshold per class (the best F1 on these
                                                                 shards) and a calibration: scores as probabilities
  lacuna export runs/my-run --out model --thresholds t.json      with those of `lacuna eval --thresholds-out t.json`
  lacuna export runs/my-run/checkpoints/step-00012000 --out model --no-onnx
  lacuna export s3://bucket/runs/my-run --out model              a run on object storage; --out may be a URL too
  lacuna predict model photo.jpg                                 use it
ONNX needs the extra `onnx` (pip install 'lacuna-trainer[onnx]'); its outputs are compared if onnxruntime is there.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Iterator

import numpy as np
import torch
from safetensors.torch import save_file

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.json_text import parse_json
from lacuna.data_pipelines.augment import Augment
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.eval.calibration import Calibration
from lacuna.tools.eval.measure import Measurement
from lacuna.tools.eval.pieces import from_parts
from lacuna.tools.eval.thresholds import read_thresholds
from lacuna.tools.export.folder import LABELS, ONNX, WEIGHTS, Exported, empty_model, file_digest
from lacuna.tools.passes.datasets import add_val_arguments, val_set
from lacuna.tools.passes.parts import Parts, absolute
from lacuna.tools.passes.pool import PoolSettings, add_pool_arguments, open_pool, pool_settings
from lacuna.tools.passes.scoring import ScoreJob, shard_rows
from lacuna.tools.passes.trained import Trained, held, read_weights
from lacuna.tools.run_files import read_file
from lacuna.trainer.methods import score_of
from lacuna.trainer.models.classifier import spatial_side

_ONNX_TOLERANCE = 1e-3  # of probabilities; other kernels add up in other orders


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN|CHECKPOINT", help="run folder (its best checkpoint), or a checkpoint")
    parser.add_argument("--out", required=True, metavar="DIR|URL", help="new folder")
    parser.add_argument("--overwrite", action="store_true", help="replace a model that --out holds")
    add_val_arguments(parser, "shards with full labels on which thresholds are chosen and scores are calibrated")
    parser.add_argument("--thresholds", metavar="FILE", help="of `lacuna eval --thresholds-out`, instead of --val")
    parser.add_argument("--no-onnx", action="store_true", help="leave out model.onnx")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_pool_arguments(parser)


def run(args: argparse.Namespace) -> None:
    if storage.exists(storage.join(args.out, LABELS)) and not args.overwrite:
        raise UserError(f"--out {args.out}: there is already a model. Choose another folder, or pass --overwrite.")
    if args.val and args.thresholds:
        raise UserError("--val and --thresholds both give thresholds. Leave one out.")
    with held(args.model, pool_settings(args).folder) as trained:
        facts = _made(trained, args)
    print(json.dumps(facts) if args.json else _text(facts))


def _made(trained: Trained, args: argparse.Namespace) -> dict:
    if not trained.classes:
        raise UserError(f"{trained.run}: its class list is nowhere to be found (classes.json, or its training set).")
    val = val_set(trained, args)
    thresholds, calibration = (None, None) if val is None else _chosen_on(trained, val, pool_settings(args))
    if args.thresholds:
        thresholds = read_thresholds(args.thresholds, trained.classes, trained.class_ids,
                                     score_of(trained.config.method).rule)
    origin = args.val or args.thresholds
    if thresholds is None and absolute(args.model) == trained.run:
        thresholds, origin = _of_held_out(trained)
    facts = {"out": args.out, "checkpoint": trained.checkpoint, "classes": len(trained.classes),
             "thresholds": int(np.isfinite(thresholds).sum()) if thresholds is not None else None,
             "calibrated": calibration is not None, "files": [WEIGHTS, LABELS]}
    with _made_here(args.out) as folder:
        exported = export(trained, folder, thresholds, origin, calibration)
        if not args.no_onnx and importlib.util.find_spec("onnxscript") is None:
            facts["without_onnx"] = "no ONNX: that needs pip install 'lacuna-trainer[onnx]'"
        elif not args.no_onnx:
            facts["onnx_difference"] = export_onnx(exported)
            facts["files"].append(ONNX)
    return facts


def _of_held_out(trained: Trained) -> tuple[np.ndarray | None, str | None]:
    """One threshold for all classes, at which a sample has as many labels as the run expects: a run without validation
    set that held samples out has measured it with these weights. (None, None) of other runs."""
    try:
        known = parse_json(read_file(trained.run, "results.json") or b"{}")["held_out"]
        limit, found = float(known["threshold"]), float(known["recall_at_threshold"])
    except (KeyError, TypeError, ValueError):
        return None, None
    origin = f"held-out samples: as many labels per sample as expected; {found:.0f} % of known labels reach it"
    return np.full(len(trained.classes), limit), origin


@contextlib.contextmanager
def _made_here(out: str) -> Iterator[str]:
    """The folder itself, or one of this machine whose files are uploaded at the end: ONNX needs a disk."""
    if storage.is_local(out):
        yield storage.local_path(out)
        return
    with tempfile.TemporaryDirectory(prefix="lacuna-export-") as folder:
        yield folder
        storage.remove([storage.join(out, name) for name in (LABELS, ONNX)])
        for name in sorted(os.listdir(folder), key=lambda name: name == LABELS):  # last: what has it is whole
            storage.upload(os.path.join(folder, name), storage.join(out, name))


def _text(facts: dict) -> str:
    limits = "no thresholds" if facts["thresholds"] is None else f"thresholds of {facts['thresholds']}"
    limits += ", calibrated" if facts["calibrated"] else ", uncalibrated (give --val, fully labelled)"
    text = f"{facts['out']}: {', '.join(facts['files'])} of {facts['checkpoint']}, {facts['classes']} classes, {limits}"
    if "without_onnx" in facts:
        text += f"; {facts['without_onnx']}"
    if facts.get("onnx_difference") is not None:
        text += f"; ONNX differs by at most {facts['onnx_difference']:.1e}"
    return text


def export(trained: Trained, out: str, thresholds: np.ndarray | None, thresholds_from: str | None,
           calibration: Calibration | None = None) -> Exported:
    """Write the weights and labels.json."""
    # What a method trained beside the head takes no part in predictions.
    weights = {name: tensor for name, tensor in read_weights(trained).items() if not name.startswith("extra.")}
    config = trained.config
    entry = "neck.weight" if "neck.weight" in weights else "head.weight"
    features = weights[entry].shape[1] if config.model.backbone == "features" else 0
    architecture = {"model": {**config.model.model_dump(mode="json"), "weights": "none"}, "feature_width": features,
                    "image_size": config.data.image_size, "normalize": config.data.normalize}
    model = empty_model(architecture, len(trained.classes))
    model.load_state_dict(weights)
    augment = Augment(config.data.image_size, crop=config.data.eval_crop)
    preprocessing: dict = {"input": f"float32 [batch, {features}]"}
    if not features:
        preprocessing = {
            "input": f"uint8 RGB [batch, 3, {augment.size}, {augment.size}]", "size": augment.size,
            "crop": augment.crop, "center_fraction": augment.center_fraction, "resize": "bilinear, antialiased",
            "normalize": "inside the model", "mean": model.mean.flatten().tolist(), "std": model.std.flatten().tolist()}
        architecture["grid"] = spatial_side(model, augment.size)
    os.makedirs(out, exist_ok=True)
    for name in (LABELS, ONNX):  # what an older model left must not stand beside new weights
        if os.path.exists(os.path.join(out, name)):
            os.remove(os.path.join(out, name))
    path = os.path.join(out, WEIGHTS)
    save_file(weights, path + ".partial")
    shutil.move(path + ".partial", path)
    source = {"run": trained.run, "checkpoint": os.path.basename(trained.checkpoint), "weights": trained.weights,
              "method": config.method["name"], "precision": config.train.precision, "thresholds_from": thresholds_from}
    exported = Exported(out, trained.classes, trained.class_ids, score_of(config.method), thresholds, calibration,
                        preprocessing, architecture, file_digest(path), source)
    exported.save()
    return exported


def _chosen_on(trained: Trained, source: ShardSource,
               settings: PoolSettings) -> tuple[np.ndarray, Calibration | None]:
    rows = shard_rows(source)
    with open_pool(settings) as pool:
        parts = pool.run(ScoreJob(trained, source), rows, settings.folder(trained.run), "scoring")
    chosen = best_thresholds(parts, source, trained.config.data.max_bad_fraction)
    if not settings.parts:
        parts.remove(list(rows))
    return chosen


def best_thresholds(parts: Parts, source: ShardSource, most_bad: float) -> tuple[np.ndarray, Calibration | None]:
    """Of scored validation shards: thresholds float64 [L] with the best F1, infinite for classes without positives;
    and the calibration, if their labels are complete."""
    measured = Measurement(source.classes).add_all(from_parts(parts, source, most_bad))
    result = measured.collector.result()
    return np.where(result.classes.positives > 0, result.thresholds, np.inf), measured.odds.fit()


class _Outputs(torch.nn.Module):
    def __init__(self, exported: Exported):
        super().__init__()
        self.model, self.exported = exported.model(), exported
        self.names = ["logits", "probabilities"] + ["calibrated"] * (exported.calibration is not None)

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.model(inputs)[0]
        scores = self.exported.score(logits, self.model.head.bias)
        return (logits, scores, self.exported.probabilities(scores))[: len(self.names)]


def export_onnx(exported: Exported) -> float | None:
    """Write model.onnx; the largest difference of its probabilities, or None if there is no onnxruntime to ask."""
    path = os.path.join(exported.folder, ONNX)
    model = _Outputs(exported).eval()
    example = _example(exported, 2)
    try:
        torch.onnx.export(model, (example,), path, input_names=["inputs"], output_names=model.names,
                          dynamic_shapes={"inputs": {0: torch.export.Dim("batch")}}, external_data=False, dynamo=True,
                          verbose=False)
    except torch.onnx.OnnxExporterError as error:
        raise UserError(f"torch.onnx cannot write the backbone {exported.architecture['model']['backbone']!r} "
                        f"({str(error).strip().splitlines()[0]}). {WEIGHTS} and {LABELS} are whole; pass --no-onnx to "
                        "make them alone.") from error
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    inputs = _example(exported, 3)  # another batch size than the one it was traced with
    with torch.no_grad():
        expected = model(inputs)[1:]
    found = session.run(model.names[1:], {"inputs": inputs.numpy()})
    difference = max(float(np.abs(f - e.numpy()).max()) for f, e in zip(found, expected, strict=True))
    if difference > _ONNX_TOLERANCE:
        os.remove(path)
        raise UserError(f"{path}: its probabilities differ by {difference:.1e} from the model's, more than "
                        f"{_ONNX_TOLERANCE}. It was removed; pass --no-onnx, and report the backbone "
                        f"{exported.architecture['model']['backbone']!r}.")
    return difference


def _example(exported: Exported, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if exported.architecture["feature_width"]:
        return torch.randn((count, exported.architecture["feature_width"]), generator=generator)
    side = exported.architecture["image_size"]
    return torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)
