"""A model folder: weights, what the outputs are called, and how an image becomes an input; needs no run and no shards.

    model.safetensors   the weights
    labels.json         class names and ids, activation, thresholds, calibration, preprocessing, architecture, origin
    model.onnx          the same network for other runtimes (uint8 pixels in), if asked; it gives logits,
                        `probabilities` (the scores that thresholds are meant for) and, with a calibration, `calibrated`
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.augment import Augment, SampleRng
from lacuna.tools.eval.calibration import Calibration
from lacuna.trainer.config.data_section import DataConfig, SplitConfig
from lacuna.trainer.config.sections import ModelConfig
from lacuna.trainer.models.classifier import Classifier, build_model
from lacuna.trainer.scores import SCORES, Score

VERSION = 3
_CALIBRATED = "probability = sigmoid(slope * ln(score / (1 - score)) + offset), score between 1e-7 and 1 - 1e-7"
UNCALIBRATED = "uncalibrated: scores rank images, they are no measured probabilities"
WEIGHTS, LABELS, ONNX = "model.safetensors", "labels.json", "model.onnx"


@dataclass(frozen=True)
class Exported:
    folder: str  # or URL
    classes: list[str]
    class_ids: list[str]
    score: Score  # of logits
    thresholds: np.ndarray | None  # float64 [L], of scores; infinite for classes that are never predicted
    calibration: Calibration | None  # None: scores are no calibrated probabilities
    preprocessing: dict[str, Any]
    architecture: dict[str, Any]
    digest: str  # sha256 of the weights
    source: dict[str, Any]

    def save(self) -> None:
        """labels.json; written last, so that a folder that has it is whole."""
        limits: list[float | None] = [None] * len(self.classes)
        if self.thresholds is not None:
            limits = [float(value) if np.isfinite(value) else None for value in self.thresholds]
        ids: list[str] | list[None] = self.class_ids or [None] * len(self.classes)
        body: dict[str, Any] = {"version": VERSION, "activation": self.score.name,
                "rule": self.score.rule if self.thresholds is not None else None,
                "calibration": _CALIBRATED if self.calibration is not None else UNCALIBRATED,
                "classes": [{"name": name, "id": identity, "threshold": limit}
                            for name, identity, limit in zip(self.classes, ids, limits, strict=True)],
                "preprocessing": self.preprocessing, "architecture": self.architecture,
                "sha256": {WEIGHTS: self.digest}, "source": self.source}
        if self.calibration is not None:
            for entry, slope, offset in zip(body["classes"], self.calibration.slopes, self.calibration.offsets,
                                            strict=True):
                entry |= {"slope": float(slope), "offset": float(offset)}
        storage.write_atomic(storage.join(self.folder, LABELS), json.dumps(body, indent=1, ensure_ascii=False).encode())

    @classmethod
    def load(cls, folder: str) -> Exported:
        where = storage.join(folder, LABELS)
        try:
            body = json.loads(storage.read_bytes(where))
            if body["version"] != VERSION:
                raise UserError(f"{where}: version {body['version']!r}, this program reads version {VERSION}.")
            limits = None if body["rule"] is None else np.array(
                [np.inf if c["threshold"] is None else c["threshold"] for c in body["classes"]], np.float64)
            ids = [c["id"] for c in body["classes"]]
            return cls(folder, [c["name"] for c in body["classes"]], ids if all(ids) else [],
                       SCORES[body["activation"]], limits, _calibration(body),
                       body["preprocessing"], body["architecture"], body["sha256"][WEIGHTS], body["source"])
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{where}: no such file, so {folder} is not a model folder. Make one with `lacuna export "
                            "RUN --out DIR`.") from None
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{where}: damaged ({type(error).__name__}: {error}). Export the model again.") from None

    def model(self) -> Classifier:
        """On the CPU, in evaluation mode."""
        path = storage.join(self.folder, WEIGHTS)
        try:
            data = storage.read_bytes(path)
        except FileNotFoundError:
            data = b""
        if hashlib.sha256(data).hexdigest() != self.digest:
            raise UserError(f"{path}: missing or damaged, it does not fit {LABELS}. Export the model again.")
        model = empty_model(self.architecture, len(self.classes))
        model.load_state_dict(load(data))
        return model

    def probabilities(self, scores: torch.Tensor) -> torch.Tensor:
        """Calibrated, where the model has a calibration; else the scores themselves."""
        return scores if self.calibration is None else self.calibration.of_tensor(scores)

    def prepare(self, image: torch.Tensor) -> torch.Tensor:
        """uint8 [3, H, W] of any size → the model's input uint8 [3, size, size], as evaluation prepares it."""
        p = self.preprocessing
        return Augment(p["size"], crop=p["crop"], center_fraction=p["center_fraction"])(image, SampleRng(0))[0]


def _calibration(body: dict[str, Any]) -> Calibration | None:
    if body["calibration"] == UNCALIBRATED:
        return None
    return Calibration(*(np.array([entry[key] for entry in body["classes"]], np.float64)
                         for key in ("slope", "offset")))


def empty_model(architecture: dict[str, Any], classes: int) -> Classifier:
    data = DataConfig(train=SplitConfig(url=""), image_size=architecture["image_size"],
                      normalize=architecture["normalize"])
    return build_model(ModelConfig(**architecture["model"]), data, classes, architecture["feature_width"]).eval()


def file_digest(path: str) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()
