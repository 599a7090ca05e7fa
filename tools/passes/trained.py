"""A trained model to look through: the best (or a named) checkpoint of a run, with the config and classes it has."""

from __future__ import annotations

import contextlib
import hashlib
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.json_text import parse_json
from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.passes.parts import absolute
from lacuna.tools.run_files import read_file, run_config, while_written
from lacuna.trainer.checkpoints.commits import COMMIT, EMA, MODEL, DamagedCommit, parse_commit
from lacuna.trainer.config.sections import Config
from lacuna.trainer.models.classifier import Classifier, build_model
from lacuna.trainer.run_log import CLASS_LIST


@dataclass(frozen=True)
class Trained:
    """Small enough to be sent to every worker; the weights stay in their file until `load_model`."""

    run: str  # folder or URL
    checkpoint: str  # likewise
    weights: str  # "ema.safetensors" if the run averages its weights, else "model.safetensors"
    digest: str  # sha256 of that file, as committed
    config: Config
    classes: list[str] = field(default_factory=list)  # names in id order; empty if nothing tells them any more
    class_ids: list[str] = field(default_factory=list)
    held: str = field(default="", compare=False)  # a copy of the weights, of a run that is still being written


def open_trained(path: str) -> Trained:
    """`path`: a run folder (its best checkpoint is taken, the last one without a validation set) or a checkpoint."""
    path = absolute(path)
    parent = path.rsplit("/", 1)[0]
    if parent.endswith("/checkpoints"):
        run, checkpoint = parent.rsplit("/", 1)[0], path
        if not storage.exists(storage.join(checkpoint, COMMIT)):
            raise UserError(f"{checkpoint}: no {COMMIT} in it, so it was never finished, or the run has replaced it. "
                            "Give another checkpoint, or the run folder.")
        config = run_config(run)
    else:
        config = run_config(path)
        run, checkpoint = path, _best(path)
    commit = _committed(checkpoint)
    files, prefix = commit["files"], commit.get("prefix", "")
    weights = EMA if EMA in files else MODEL
    return Trained(run, checkpoint, f"{prefix}/{weights}".lstrip("/"), files[weights]["sha256"], config,
                   *class_list(run, config))


@contextlib.contextmanager
def held(path: str, folder: Callable[[str], str]) -> Iterator[Trained]:
    """Like `open_trained`, for passes that take a while: the weights of a run that is still being written are copied to
    `folder(run)`, which all workers see, and removed at the end."""
    trained = while_written(_run_of(absolute(path)), lambda: _hold(open_trained(path), folder))
    try:
        yield trained
    finally:
        if trained.held:
            storage.remove([trained.held])


def _hold(trained: Trained, folder: Callable[[str], str]) -> Trained:
    if storage.exists(storage.join(trained.run, "results.json")):
        return trained
    copy = storage.join(folder(trained.run), f"weights-{trained.digest[:16]}-{uuid.uuid4().hex[:8]}.safetensors")
    storage.write_atomic(copy, _weights_of(trained))
    return replace(trained, held=copy)


def _run_of(path: str) -> str:
    """Of a run's own URL, or of one of its checkpoints."""
    parent = path.rsplit("/", 1)[0]
    return parent.rsplit("/", 1)[0] if parent.endswith("/checkpoints") else path


def finished_checkpoints(run: str) -> list[str]:
    """Those that were committed, oldest first."""
    root = storage.join(run, "checkpoints")
    return [storage.join(root, name) for name in storage.list_names(root)
            if name.startswith("step-") and storage.exists(storage.join(root, name, COMMIT))]


def _best(run: str) -> str:
    whole = finished_checkpoints(run)
    if not whole:
        raise UserError(f"{run}: no finished checkpoint in its checkpoints/. Give a run folder with one, or one of the "
                        "checkpoints/step-… folders themselves.")
    last = whole[-1]
    step = _committed(last)["position"].get("best_step")
    return next((folder for folder in whole if isinstance(step, int) and folder.endswith(f"-{step:08d}")), last)


def _committed(checkpoint: str) -> dict:
    where = storage.join(checkpoint, COMMIT)
    try:
        body = parse_commit(storage.read_bytes(where))
        str(body["files"][MODEL]["sha256"])
        return body
    except (DamagedCommit, KeyError) as error:
        raise UserError(f"{where}: {error}. Give another checkpoint.") from None


def class_list(run: str, config: Config) -> tuple[list[str], list[str]]:
    """(names, ids) of the model's outputs; empty if nothing tells them any more."""
    kept = read_file(run, CLASS_LIST)
    if kept is not None:
        try:
            body = parse_json(kept)
            names, ids = body["classes"], body["class_ids"]
            if not all(isinstance(part, list) and all(isinstance(name, str) for name in part) for part in (names, ids)):
                raise ValueError("its entries are not lists of names")
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{storage.join(run, CLASS_LIST)}: damaged ({type(error).__name__}: {error}). Remove it: "
                            "the names then come from the training set, if it is there.") from None
        return names, ids
    try:  # a run of before the list was kept: its training set still has it, if it is there
        index = ShardIndex.load(config.data.train.url)
    except UserError:
        return [], []
    return index.classes, index.class_ids


def check_classes(trained: Trained, index: ShardIndex) -> None:
    """The model's class i must be the index's class i: a permuted list gives numbers, but of nothing."""
    if not trained.classes:
        return
    ours, theirs = (trained.classes, index.classes)
    if trained.class_ids and index.class_ids:
        ours, theirs = trained.class_ids, index.class_ids
    if ours == theirs:
        return
    place = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    mine = repr(ours[place]) if place < len(ours) else "nothing"
    its = repr(theirs[place]) if place < len(theirs) else "nothing"
    raise UserError(f"{index.url}: its class list ({len(theirs)} classes) is not that of {trained.run} ({len(ours)}): "
                    f"class {place} is {its}, the model's is {mine}. Make the shards with the model's class list.")


def read_weights(trained: Trained) -> dict[str, torch.Tensor]:
    """The committed tensors; the file's hash is checked."""
    data = _weights_of(trained)
    try:
        return load(data)
    except SafetensorError as error:
        raise UserError(f"{trained.checkpoint}/{trained.weights}: not whole safetensors ({error}). Give another "
                        "checkpoint.") from None


def _weights_of(trained: Trained) -> bytes:
    path = trained.held or storage.join(trained.checkpoint, trained.weights)
    try:
        data = storage.read_bytes(path)
    except FileNotFoundError:
        raise UserError(f"{path}: not there, seen from {os.uname().nodename}. If the run goes on, it has replaced this "
                        "checkpoint: give the run folder, whose newest is taken. Else that node does not see the "
                        "storage.") from None
    if hashlib.sha256(data).hexdigest() != trained.digest:
        raise UserError(f"{path}: damaged, its content does not fit {COMMIT}. Give another checkpoint.")
    return data


def load_model(trained: Trained, source: ShardSource, device: torch.device) -> Classifier:
    """In evaluation mode; pretrained weights are not fetched."""
    weights = read_weights(trained)
    classes = len(weights["head.bias"])
    if classes != source.classes:
        raise UserError(f"{source.index.url}: {source.classes} classes, the model of {trained.run} has {classes}.")
    config = trained.config.model.model_copy(update={"weights": "none"})
    model = build_model(config, trained.config.data, classes, source.feature_width)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"{trained.checkpoint}/{trained.weights} does not fit the model of {trained.run}/config.yaml "
                        f"on {source.index.url}: "
                        f"{' '.join(str(error).split())}") from None
    if trained.config.train.channels_last:
        model = model.to(memory_format=torch.channels_last)
    return model.to(device).eval()
