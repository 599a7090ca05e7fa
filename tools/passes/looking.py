"""One look at every sample: its scores and its features together, for commands that need both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.passes.parts import fingerprint_of
from lacuna.tools.passes.scoring import Arrays, on_this_device, pass_facts
from lacuna.tools.passes.trained import Trained
from lacuna.trainer.methods import score_of
from lacuna.trainer.models.classifier import Classifier
from lacuna.trainer.scores import Score


@dataclass(frozen=True)
class LookJob:
    """Parts with `scores` float32 [n, L], `features` float16 [n, D] of length 1, `rows`, `bad`. Labels play no part."""

    trained: Trained
    source: ShardSource

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(job="look", **pass_facts(self.trained, self.source))

    def build(self) -> Callable[[int], Arrays]:
        worker, classes = on_this_device(self.trained, self.source), self.source.classes
        score = score_of(self.trained.config.method)

        def work(shard: int) -> Arrays:
            both, facts = worker.run(shard, lambda model, inputs: scores_and_features(model, inputs, score))
            return {"scores": both[:, :classes], "features": unit(both[:, classes:]).astype(np.float16), **facts}

        return work


def scores_and_features(model: Classifier, inputs: torch.Tensor, score: Score) -> torch.Tensor:
    """[B, L + D]: scores as the run's method makes them of logits, beside pooled features."""
    logits, _, features = model(inputs)
    pooled = features.mean((2, 3)) if features.ndim == 4 else features
    return torch.cat([score(logits, model.head.bias), pooled.float()], 1)


def unit(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths == 0, 1, lengths)
