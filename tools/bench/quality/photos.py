"""Heads on a frozen ImageNet backbone over random-resized crops: the photo set of `bench quality`.

Every head has its own optimizer and per-sample state, through the method contract that the trainer uses: plan, leased
rows, `Method.loss` with logits and score maps, rows written back. What the backbone sees comes from quality_crops.py.
Schedule, as in Verelst et al.: a warm-up with AN for all heads (the oracle's with its full labels), then the method,
whose best epoch is chosen on the validation photos; the last epoch is reported beside it. Only ROLE begins with itself,
as its authors train it: its label estimates start at ½ and would first undo what AN taught.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator

import numpy as np
import torch

from lacuna.basics.hashing import mix
from lacuna.data_pipelines.labels import NEGATIVE
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.stream import Batch
from lacuna.tools.bench.quality.crops import Views
from lacuna.trainer.config.sections import ModelConfig
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import EpochStart, Method, Outputs, Scored, Step, Task
from lacuna.trainer.metrics.collector import ScoreCollector
from lacuna.trainer.models.classifier import Classifier
from lacuna.trainer.sample_state import NoState, SampleState
from lacuna.trainer.scores import Score
from lacuna.trainer.world import World

BATCH, STREAMS, OPEN_SHARDS = 32, 4, 2
WARM_EPOCHS, EPOCHS, TUNED_EPOCHS, WARM_LR = 5, 11, 5, 2e-3
_TEST_BATCH = 256
_STATE_BUDGET = 1 << 30
_OFFSET = 3  # crops that a seed starts after the one before it


def _trials(name: str, *settings: dict, lrs=(2e-3, 5e-4), labels: str = "single") -> list[dict]:
    return [{"lr": lr, "method": {"name": name, **s}, "labels": labels} for lr in lrs for s in settings]


def _verelst(name: str, *settings: dict, lrs=(2e-3, 5e-4)) -> list[dict]:
    return _trials(name, *({"start_phase": 1, **s} for s in settings), lrs=lrs)


_FOUR = (2e-3, 1e-3, 5e-4, 2e-4)
_GAMMAS = ({"gamma": 0.1}, {"gamma": 1.0})
# ROLE's φ-lr of the set `features`, 0.01 and 0.03, times 2.3: an entry whose gradient keeps its sign is moved by dense
# Adam 343 × φ-lr in 15 epochs of 800 steps there, 45 + 105 times in the 5 + 11 epochs of 107 steps here.
_ROLE = ({"lr": 0.023}, {"lr": 0.069})
# Four trials of every method, chosen on the validation photos.
PHOTO_TRIALS: dict[str, list[dict]] = {
    "oracle": _trials("bce", {}, lrs=_FOUR, labels="labels"),
    "an": _trials("an", {}, lrs=_FOUR),
    "en": _verelst("en", {}, lrs=_FOUR),
    "en_cl": _verelst("en_cl", *_GAMMAS),
    "en_scl": _verelst("en_scl", *_GAMMAS),
    "role": _trials("role", *_ROLE),
    "epr": _trials("epr", {}, lrs=_FOUR),
    "wan": _trials("wan", {}, lrs=_FOUR),
    "an_scl": _verelst("an_scl", *_GAMMAS),
    "an_cl": _verelst("an_cl", *_GAMMAS),
}
# Two of those that train the last blocks, too; γ is the one that was chosen with the whole backbone fixed.
_TWO = (3e-4, 1e-4)
TUNED_TRIALS: dict[str, list[dict]] = {
    "an": _trials("an", {}, lrs=_TWO),
    "en": _verelst("en", {}, lrs=_TWO),
    "en_scl": _verelst("en_scl", {"gamma": 0.1}, lrs=_TWO),
    "oracle": _trials("bce", {}, lrs=_TWO, labels="labels"),
}


class PhotoTrials:
    """Trains the heads that have no score yet."""

    scores_file = "photo_scores.jsonl"

    def __init__(self, data: str, out: str, views: Views, epochs: int = EPOCHS):
        self.data, self.out, self.views, self.epochs = data, out, views, epochs
        self.path = os.path.join(out, self.scores_file)
        self.world = World(torch.device("cpu"))
        self.crops = [views.load(f"crop-{number}") for number in range(views.crops)]
        self._tests: dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]] = {}

    def score(self, method: str, trial: dict, seed: int) -> dict:
        """{"val", "test"} at the best validation epoch, {"last_val", "last_test"} at the end, and the val "curve"."""
        key = json.dumps([trial, seed, self.views.crops, self.epochs], sort_keys=True)
        known: dict[str, dict] = {}
        if os.path.exists(self.path):
            with open(self.path, encoding="utf-8") as f:
                known = {line["key"]: line for line in map(json.loads, f)}
        if key not in known:
            name = hashlib.sha256(key.encode()).hexdigest()[:16]
            folder = os.path.join(self.out, "heads", name)
            shutil.rmtree(folder, ignore_errors=True)  # a trial is minutes: one that was killed starts again
            known[key] = {"key": key, **self._train(trial, seed, folder)}
            shutil.rmtree(folder, ignore_errors=True)
            with open(self.path, "a", encoding="utf-8") as f:
                f.write(json.dumps(known[key]) + "\n")
            row = known[key]
            print(f"  {method} {json.dumps(trial)} seed {seed}: val {row['val']:.2f}, test {row['test']:.2f} "
                  f"(last epoch {row['last_test']:.2f})", flush=True)
        return known[key]

    def _train(self, trial: dict, seed: int, folder: str) -> dict:
        source = ShardSource.load(os.path.join(self.data, "train"), trial["labels"], "train")
        task = self._task(source, seed)
        torch.manual_seed(mix(seed, 0))
        width = self.crops[0]["maps"].shape[1]
        model = Classifier(torch.nn.Identity(), width, source.classes, ModelConfig(), "centered")
        method = build_method(trial["method"], task)
        own = "start_phase" in trial["method"] or trial["method"]["name"] == "role"
        warm = method if own else build_method({"name": "an"}, task)
        head = Head(model, source, self.world, seed, self.crops)
        state: SampleState | NoState = NoState()
        if method.fields():
            state = SampleState(os.path.join(folder, "state"), method, source, self.world, _STATE_BUDGET, seed, None)
        curve: list[dict[str, float]] = []
        phases = (((warm, state if warm is method else NoState()), WARM_EPOCHS, WARM_LR), ((method, state), self.epochs,
                                                                                     trial["lr"]))
        for phase, ((active, rows), epochs, lr) in enumerate(phases):
            learns = self.begin_phase(phase, head)
            optimizer = torch.optim.Adam(learns, lr=lr)
            for epoch in range(epochs):
                steps = head.epoch(active, rows, optimizer, phase, epoch, epochs, len(curve))
                curve.append({name: self.map_of(head, name, active.score) for name in ("val", "test")})
            active.end_phase(epochs * steps)
        state.close()
        best = max(curve[WARM_EPOCHS:], key=lambda epoch: epoch["val"])  # the warm-up is the same for all
        return {"val": best["val"], "test": best["test"], "last_val": curve[-1]["val"], "last_test": curve[-1]["test"],
                "curve": [round(epoch["val"], 2) for epoch in curve]}

    def begin_phase(self, phase: int, head: Head) -> list[torch.nn.Parameter]:
        """The parameters that learn."""
        return list(head.model.head.parameters())

    def _task(self, source: ShardSource, seed: int) -> Task:
        positives, negatives = source.subset_counts()
        val = self.views.sources["val"]
        found = val.subset_counts()[0].sum() / val.rows.sum()
        return Task(source.classes, int(source.rows.sum()), positives, negatives, source.sidecar.unlisted == NEGATIVE,
                    self.crops[0]["maps"].shape[-1], float(found), seed, self.crops[0]["maps"].shape[1])

    def map_of(self, head: Head, name: str, score: Score) -> float:
        part = head.inputs or "pooled"
        if (name, part) not in self._tests:
            self._tests[name, part] = _tested(self.views, name, part)
        inputs, labels = self._tests[name, part]
        collector = ScoreCollector(labels.shape[1])
        with torch.no_grad():
            logits = [head.model(part.float())[0] for part in inputs.split(_TEST_BATCH)]
            collector.add(score(torch.cat(logits)), labels, ordinals=np.arange(len(labels)))
        return collector.result(None).summary()["map"]


class TunedTrials(PhotoTrials):
    """The same warm-up; then the last blocks of the backbone learn with the head. BatchNorm statistics are fixed."""

    scores_file = "tuned_scores.jsonl"

    def __init__(self, data: str, out: str, views: Views, epochs: int = TUNED_EPOCHS):
        super().__init__(data, out, views, epochs)

    def begin_phase(self, phase: int, head: Head) -> list[torch.nn.Parameter]:
        if phase:
            warm = head.model.head
            head.model = Classifier(self.views.last_blocks(), warm.in_features, warm.out_features, ModelConfig(),
                                    "centered").train()
            head.model.head.load_state_dict(warm.state_dict())
            head.inputs = "middle"
        return list(head.model.parameters())


class Head:
    """One classifier over the crops, epoch by epoch."""

    def __init__(self, model: Classifier, source: ShardSource, world: World, seed: int, crops: list[dict]):
        self.model, self.source, self.world, self.seed, self.crops = model, source, world, seed, crops
        self.inputs = ""  # the part of a crop that the model takes; by default what the method needs of the maps
        shards = range(len(source.index.shards))
        self.first = source.index.rows.cumsum() - source.index.rows
        assert source.subset is not None
        self.used = [np.flatnonzero(source.subset.mask(shard)) for shard in shards]
        self.labels = np.concatenate([source.sidecar.labels(shard).dense(source.classes) for shard in shards])

    def epoch(self, method: Method, state: SampleState | NoState, optimizer: torch.optim.Optimizer, phase: int,
              epoch: int, epochs: int, epochs_before: int) -> int:
        """The number of steps."""
        plan = EpochPlan(self.source.rows, mix(self.seed, phase), epoch, STREAMS, BATCH, OPEN_SHARDS)
        crop = self.crops[(_OFFSET * self.seed + epochs_before) % len(self.crops)]
        method.begin_epoch(EpochStart(phase, epoch, epochs, epochs_before, self.world, state, _no_pass))
        state.begin_epoch(plan, 0, epochs_before)
        with_maps = method.needs().maps
        for number, (shards, places) in enumerate(plan.batches(range(STREAMS), 0), epoch * plan.steps):
            batch = self._batch(shards, places, crop, self.inputs or ("maps" if with_maps else "pooled"))
            with state.step(batch) as held:
                step = Step(self.world, len(batch), epoch, epochs, phase, number, held)
                terms = method.loss(Outputs(*self.model(batch.inputs, with_maps=with_maps)), batch, step)
                loss = terms.per_sample.sum() / len(batch)
                optimizer.zero_grad()
                (loss if terms.coupled is None else loss + terms.coupled).backward()
                optimizer.step()
                held.write(terms.rows)
        state.end_epoch()
        return plan.steps

    def _batch(self, shards: np.ndarray, places: np.ndarray, crop: dict[str, np.ndarray], what: str) -> Batch:
        rows = np.array([self.used[shard][place] for shard, place in zip(shards, places, strict=True)])
        where = self.first[shards] + rows
        inputs, boxes, flips = (torch.from_numpy(crop[part][where]) for part in (what, "boxes", "flips"))
        return Batch(inputs.float(), torch.from_numpy(self.labels[where]), shards, rows, boxes, flips, shards)


def _no_pass() -> Iterator[Scored]:
    raise NotImplementedError("methods that score all samples between epochs are not among those on photos")


def _tested(views: Views, name: str, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(pooled features or maps [n, …], labels [n, L]) of the validation or test photos."""
    source = views.sources[name]
    shards = range(len(source.index.shards))
    first = source.index.rows.cumsum() - source.index.rows
    used = [np.arange(source.index.rows[s]) if source.subset is None else np.flatnonzero(source.subset.mask(s))
            for s in shards]
    where = np.concatenate([first[s] + used[s] for s in shards])
    labels = np.concatenate([source.sidecar.labels(s).dense(source.classes)[used[s]] for s in shards])
    return torch.from_numpy(views.load(name)[part][where]), torch.from_numpy(labels)
