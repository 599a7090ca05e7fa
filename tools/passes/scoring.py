"""What a model says about one shard: batches in row order, the same on every worker, and the jobs made of that.

Legend: n readable rows of a shard, L classes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np
import torch

from lacuna.data_pipelines.batch import BadSample
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.stream import EpochStream
from lacuna.tools.passes.parts import absolute, fingerprint_of
from lacuna.tools.passes.trained import Trained, load_model
from lacuna.trainer.cache.stream import CachedStream
from lacuna.trainer.cache.views import View
from lacuna.trainer.config.sections import Config
from lacuna.trainer.evaluate import EVAL_BATCH, autocast, eval_stream, model_inputs
from lacuna.trainer.methods import score_of
from lacuna.trainer.models.classifier import Classifier
from lacuna.trainer.world import World

T = TypeVar("T")
Arrays = Mapping[str, np.ndarray]


class ShardModel:
    """A model beside the data it looks at; built once by a worker, then asked about one shard after another."""

    def __init__(self, model: Classifier, source: ShardSource, config: Config, view: View | None = None):
        """`view`: what a phase's cache has of the source (passes/cached.py); the model is cut there."""
        self.model, self.source, self.config, self.view = model, source, config, view
        self.world = World(model.mean.device)

    def run(self, shard: int, compute: Callable[[Classifier, torch.Tensor], torch.Tensor]) -> tuple[np.ndarray, Arrays]:
        """(compute's answers [n, …], facts): facts are `rows` int64 [n] (places in the tar) and `bad` (for `bad_of`).

        Batches are those of this shard alone, so what is computed does not depend on the other shards.
        """
        counts = np.zeros_like(self.source.counts)
        counts[shard] = self.source.counts[shard]
        plan = EpochPlan(counts, 0, 0, 1, EVAL_BATCH, open_shards=1, shuffle=False)
        answers, places, bad = [], [], list[BadSample]()
        with self._stream(plan) as stream, torch.no_grad(), autocast(self.config, self.world):
            for batch in stream:
                bad += batch.bad
                if len(batch):
                    inputs = model_inputs(batch.inputs, self.config, self.world)
                    answers.append(compute(self.model, inputs).float().cpu().numpy())
                    places.append(batch.rows)
        facts = {"rows": np.concatenate(places) if places else np.zeros(0, np.int64), "bad": pack_bad(bad)}
        return (np.concatenate(answers) if answers else np.zeros((0, 0), np.float32)), facts

    def _stream(self, plan: EpochPlan) -> EpochStream | CachedStream:
        if self.view is None:
            return eval_stream(self.source, plan, self.config, self.world)
        return CachedStream(self.view, self.model, self.config, self.world, plan)

    def scores(self, shard: int) -> tuple[np.ndarray, Arrays]:
        """(scores [n, L] as the run's method makes them of logits, facts)."""
        score = score_of(self.config.method)
        return self.run(shard, lambda model, inputs: score(model(inputs)[0], model.head.bias))


@dataclass(frozen=True)
class ScoreJob:
    """Every sample's scores: parts with `scores` float32 [n, L], `rows`, `bad`. Labels play no part in it."""

    trained: Trained
    source: ShardSource

    @property
    def fingerprint(self) -> str:
        return fingerprint_of(job="scores", **pass_facts(self.trained, self.source))

    def build(self) -> Callable[[int], Arrays]:
        worker = on_this_device(self.trained, self.source)

        def work(shard: int) -> Arrays:
            scores, facts = worker.scores(shard)
            return {"scores": scores, **facts}

        return work


def on_this_device(trained: Trained, source: ShardSource) -> ShardModel:
    """For a worker: on the GPU that Ray gave to it, if any; with one thread, so that sums have one order anywhere."""
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return ShardModel(load_model(trained, source, device), source, trained.config)


def pass_facts(trained: Trained, source: ShardSource) -> dict:
    """What a pass's numbers depend on: weights, how images are prepared and scores made, and which samples."""
    data = trained.config.data
    return {"weights": trained.digest, "inputs": [data.image_size, data.eval_crop, data.normalize],
            "precision": trained.config.train.precision, "batch": EVAL_BATCH,
            "score": score_of(trained.config.method).name, **data_facts(source)}


def data_facts(source: ShardSource) -> dict:
    """Which samples a pass is about."""
    index = source.index
    # Shards of small images may agree in every size, and then two sets have one index fingerprint: look at keys too.
    some = sorted({0, len(index.shards) - 1})
    keys = [hashlib.sha256(index.members(shard).to_bytes()).hexdigest() for shard in some]
    return {"index": index.fingerprint, "url": absolute(index.url), "keys": keys,
            "subset": source.subset.fingerprint if source.subset else "all rows"}


def shard_rows(source: ShardSource) -> dict[int, int]:
    """shard → samples that take part, of shards that have any."""
    return {int(shard): int(source.counts[shard]) for shard in np.flatnonzero(source.counts)}


def pack_bad(bad: list[BadSample]) -> np.ndarray:
    return np.frombuffer(json.dumps([asdict(sample) for sample in bad]).encode(), np.uint8)


def bad_of(part: Arrays) -> list[BadSample]:
    """Samples of a part that could not be decoded."""
    return [BadSample(**facts) for facts in json.loads(part["bad"].tobytes())]
