"""Classifiers of timm and torchvision with their own classes, added up to ours by a mapping.

    score of our class = Σ of the probabilities (softmax) of the model's classes that belong to it; with sigmoid outputs
    their largest. A class without any gets 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lacuna.basics.errors import UserError
from lacuna.basics.flag_text import flag_lines
from lacuna.tools.scores.looking import Look
from lacuna.trainer.models.weights import is_file, read_tensors


@dataclass(frozen=True)
class ModelClass:
    """One output of a classifier."""

    wnid: str  # "" where it has none
    words: tuple[str, ...]


@dataclass(frozen=True)
class ClassifierModel:
    source: str  # "timm" or "torchvision"
    name: str
    weights: str  # "default", or a file
    digest: str = ""
    size: int = 0  # side of its input; 0: as it was trained
    activation: str = "softmax"
    temperature: float = 1.0
    mapping: tuple[tuple[int, ...], ...] = ()  # outputs that belong to each of our classes

    @property
    def facts(self) -> dict:
        return {self.source: self.name, "weights": self.digest or self.weights, "size": self.size,
                "activation": self.activation, "temperature": self.temperature, "mapping": self.mapping}

    def load(self, device: torch.device) -> tuple[Look, Callable[[torch.Tensor], torch.Tensor]]:
        model, look = self.open()
        model = model.to(device)

        def scores(pixels: torch.Tensor) -> torch.Tensor:
            logits = model(pixels).float() / self.temperature
            sigmoid = self.activation == "sigmoid"
            found = torch.sigmoid(logits) if sigmoid else torch.softmax(logits, 1)
            ours = [(found[:, list(own)].amax(1) if sigmoid else found[:, list(own)].sum(1)) if own
                    else found.new_zeros(len(found)) for own in self.mapping]
            return torch.stack(ours, 1)

        return look, scores

    def open(self) -> tuple[torch.nn.Module, Look]:
        """In evaluation mode, with its weights."""
        try:
            model, look = (_timm if self.source == "timm" else _torchvision)(self.name, self.weights)
        except UserError:
            raise
        except Exception as error:  # both raise many kinds
            reason = " ".join(str(error).split("\n")[0].split())[:300].rstrip(".")
            raise UserError(f"{self.source}:{self.name} with --weights {self.weights}: {reason}. Give a name that it "
                            "lists, and a file of weights where there is no connection.") from None
        if is_file(self.weights):
            _fill(model, self.weights)
        return model.eval(), Look(self.size or look.size, look.interpolation, look.mean, look.std)

    def class_vectors(self) -> np.ndarray | None:
        """float32 [L, D]: the directions that its last layer, less the mean over its outputs, has for our classes, of
        length 1, or 0 without a counterpart. None if it does not end with a linear layer."""
        model, _ = self.open()
        last = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1:]
        if not last or last[0].out_features <= max((max(own) for own in self.mapping if own), default=0):
            return None
        rows = last[0].weight.detach().double()
        rows = rows - rows.mean(0)
        ours = torch.stack([rows[list(own)].mean(0) if own else torch.zeros_like(rows[0]) for own in self.mapping])
        return torch.nn.functional.normalize(ours, dim=1).float().numpy()

    def classes(self, listed: str | None = None) -> list[ModelClass]:
        """What its outputs are: the lines of a file (`wnid<TAB>name, name` or names), or ImageNet's by their number."""
        model, look = self.open()
        with torch.no_grad():
            outputs = model(torch.zeros(1, 3, look.size, look.size)).shape[1]
        found = _listed(listed) if listed else _imagenet(model, outputs)
        if len(found) != outputs:
            raise UserError(f"{self.source}:{self.name} has {outputs} outputs, {listed or 'what is known of it'} names "
                            f"{len(found)}. Give --model-classes FILE with one line for each.")
        return found


def _timm(name: str, weights: str) -> tuple[torch.nn.Module, Look]:
    import timm

    model = timm.create_model(name, pretrained=weights == "default")
    found = timm.data.resolve_data_config({}, model=model)
    return model, Look(found["input_size"][-1], found["interpolation"], tuple(found["mean"]), tuple(found["std"]))


def _torchvision(name: str, weights: str) -> tuple[torch.nn.Module, Look]:
    import torchvision

    chosen = torchvision.models.get_model_weights(name)
    best = chosen["DEFAULT" if weights == "default" or is_file(weights) else weights]
    prepares = best.transforms()
    look = Look(prepares.crop_size[0], prepares.interpolation.value, tuple(prepares.mean), tuple(prepares.std))
    return torchvision.models.get_model(name, weights=None if is_file(weights) else best), look


def _fill(model: torch.nn.Module, path: str) -> None:
    found = {name.removeprefix("module."): tensor for name, tensor in read_tensors(path, "--weights").items()}
    wanted = model.state_dict()
    lacking = [name for name, tensor in wanted.items() if not name.endswith("num_batches_tracked")
               and (name not in found or found[name].shape != tensor.shape)]
    if lacking:
        raise UserError(f"--weights {path}: lacks {len(lacking)} of {len(wanted)} tensors of the model, or has them in "
                        f"another shape, e.g. {lacking[0]!r}. Its classifier must be in it.")
    model.load_state_dict({name: found[name] for name in wanted if name in found}, strict=False)


def _imagenet(model: Any, outputs: int) -> list[ModelClass]:
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = None
    with contextlib.suppress(Exception):
        subset = infer_imagenet_subset(model)
    if subset is None and outputs == 1000:
        subset = "imagenet-1k"
    if subset is None:
        return []
    info = ImageNetInfo(subset)
    return [ModelClass(wnid, tuple(word.strip() for word in info.label_name_to_description(wnid).split(",")))
            for wnid in info.label_names()]


def _listed(path: str) -> list[ModelClass]:
    found = []
    for line in flag_lines("--model-classes", path):
        wnid, tab, words = line.partition("\t")
        found.append(ModelClass(wnid if tab else "", tuple(w.strip() for w in (words if tab else line).split(","))))
    return found
