"""A trained model to look through: the best (or a named) checkpoint of a run, with the config and classes it has."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field

import torch
from safetensors.torch import load_file

from data_pipelines import storage
from data_pipelines.errors import UserError
from data_pipelines.index import ShardIndex
from data_pipelines.source import ShardSource
from trainer.checkpoint import COMMIT
from trainer.config import Config, load_config
from trainer.models import Classifier, build_model
from trainer.run_log import CLASS_LIST


@dataclass(frozen=True)
class Trained:
    """Small enough to be sent to every worker; the weights stay in their file until `load_model`."""

    run: str  # folder
    checkpoint: str  # folder
    weights: str  # "ema.safetensors" if the run averages its weights, else "model.safetensors"
    digest: str  # sha256 of that file, as committed
    config: Config
    classes: list[str] = field(default_factory=list)  # names in id order; empty if nothing tells them any more
    class_ids: list[str] = field(default_factory=list)


def open_trained(path: str) -> Trained:
    """`path`: a run folder (its best checkpoint is taken, the last one without a validation set) or a checkpoint."""
    path = os.path.abspath(storage.local_path(path))
    if not os.path.isdir(path):
        raise UserError(f"{path}: no such folder. Give a run folder, or one of its checkpoints/step-… folders.")
    if os.path.basename(os.path.dirname(path)) == "checkpoints":
        run, checkpoint = os.path.dirname(os.path.dirname(path)), path
        if not os.path.exists(os.path.join(checkpoint, COMMIT)):
            raise UserError(f"{checkpoint}: no {COMMIT} in it, so it was never finished. Give another checkpoint.")
    else:
        run, checkpoint = path, _best(path)
    where = os.path.join(run, "config.yaml")
    if not os.path.exists(where):
        raise UserError(f"{where}: no such file, so {run} is not a run folder.")
    config = load_config(where, [])
    try:
        files = json.loads(storage.read_bytes(os.path.join(checkpoint, COMMIT)))["files"]
        weights = next(name for name in ("ema.safetensors", "model.safetensors") if name in files)
        digest = files[weights]["sha256"]
    except (ValueError, KeyError, TypeError, StopIteration):
        raise UserError(f"{os.path.join(checkpoint, COMMIT)}: damaged. Give another checkpoint.") from None
    return Trained(run, checkpoint, weights, digest, config, *_class_list(run, config))


def _best(run: str) -> str:
    root = os.path.join(run, "checkpoints")
    whole = [os.path.join(root, name) for name in storage.list_names(root)
             if os.path.exists(os.path.join(root, name, COMMIT))]
    if not whole:
        raise UserError(f"{run}: no finished checkpoint in its checkpoints/. Train it first, or give a run folder.")
    last = whole[-1]
    step = json.loads(storage.read_bytes(os.path.join(last, "position.json")))["best_step"]
    return next((folder for folder in whole if step is not None and folder.endswith(f"-{step:08d}")), last)


def _class_list(run: str, config: Config) -> tuple[list[str], list[str]]:
    path = os.path.join(run, CLASS_LIST)
    if os.path.exists(path):
        body = json.loads(storage.read_bytes(path))
        return body["classes"], body["class_ids"]
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
    path = os.path.join(trained.checkpoint, trained.weights)
    try:
        with open(path, "rb") as f:
            found = hashlib.file_digest(f, "sha256").hexdigest()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file on {os.uname().nodename}. The run folder must be on storage that all "
                        "nodes see.") from None
    if found != trained.digest:
        raise UserError(f"{path}: damaged, its content does not fit {COMMIT}. Give another checkpoint.")
    return load_file(path)


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
