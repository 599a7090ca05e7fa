"""The photo sets of `bench quality`: rows on a fixed ImageNet backbone over random crops, trained as by `lacuna table`.

Phases have a cache, so dozens of heads share the backbone's forward passes, which are nearly all of the work. Schedule,
as in Verelst et al.: a warm-up, in which EN, CL and SCL are still AN (start_phase), then the method, whose best epoch
is chosen on the validation photos; other methods are themselves from the first epoch on. In the sets photos_last… the
last blocks of the backbone learn with the head after the first phase. Sets ending in _tuned have the head's recipe
(recipe.py) for every method, and each is itself from the first step on. photos_last_tuned: the head as in photos_tuned
first, then a few epochs in which the last block learns too; one block, since it costs two fifths of three.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from lacuna.data_pipelines.index import ShardIndex
from lacuna.tools.bench.quality import recipe
from lacuna.tools.bench.quality.lite0 import LITE0, LITE0_LAST, LITE0_LAST_BLOCK, SIZE
from lacuna.tools.bench.quality.recipe import MODEL, SCHEDULE, head_decay
from lacuna.tools.cache.filling import fill
from lacuna.tools.passes.pool import PoolSettings
from lacuna.tools.table.rows import RowWork
from lacuna.tools.table.work import train_rows
from lacuna.tools.trials.crew import CrewSettings
from lacuna.trainer.config.tables import Row
from lacuna.trainer.methods import example

BATCH, STREAMS, OPEN_SHARDS = 32, 4, 2
WARM_EPOCHS, EPOCHS, LAST_EPOCHS, WARM_LR = 5, 11, 5, 2e-3
TUNED_BATCH, TUNED_EPOCHS, TUNED_LR, TUNED_LAST_EPOCHS = 128, 18, 2e-3, 3


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
LAST_TRIALS: dict[str, list[dict]] = {
    "an": _trials("an", {}, lrs=_TWO),
    "en": _verelst("en", {}, lrs=_TWO),
    "en_scl": _verelst("en_scl", {"gamma": 0.1}, lrs=_TWO),
    "oracle": _trials("bce", {}, lrs=_TWO, labels="labels"),
}


def _tuned(name: str, *settings: dict, **other: str) -> list[dict]:
    return recipe.trials(name, (0.01, 0.03, 0.1, 0.3), (TUNED_LR, 1e-3), *settings, **other)


# A quarter of the features' images: larger decays.
TUNED_TRIALS: dict[str, list[dict]] = {
    "oracle": _tuned("bce", labels="labels"),
    "an": _tuned("an"),
    "selection": _tuned("selection"),
    "softmax": _tuned("softmax"),
    "en": _tuned("en"),
    "role": _tuned("role", {"lr": 1e-1}, {"lr": 3e-1}),
    "en_scl": _tuned("en_scl", {"gamma": 0.1}, {"gamma": 1.0}),
}
# Of the last block: the same decays, of the head in both phases. Settings of the methods' own: ROLE's as chosen on
# features (tuned), γ as chosen on photos with heads as published.
_LAST_OWN: dict[str, dict] = {"role": {"lr": 0.1}, "en_scl": {"gamma": 0.1}}
LAST_TUNED_TRIALS: dict[str, list[dict]] = {
    method: recipe.trials(trials[0]["method"]["name"], (0.03, 0.01, 0.1, 0.3), (1e-3, 3e-4), _LAST_OWN.get(method, {}),
                          labels=trials[0].get("labels", "single")) for method, trials in TUNED_TRIALS.items()
}


@dataclass(frozen=True)
class PhotoSet:
    trials: dict[str, list[dict]]
    last: tuple[str, ...] = ()  # parts of the backbone that learn after the first phase, too
    tuned: bool = False  # which of the two protocols


PHOTO_SETS = {"photos": PhotoSet(PHOTO_TRIALS), "photos_last": PhotoSet(LAST_TRIALS, last=LITE0_LAST),
              "photos_tuned": PhotoSet(TUNED_TRIALS, tuned=True),
              "photos_last_tuned": PhotoSet(LAST_TUNED_TRIALS, last=LITE0_LAST_BLOCK, tuned=True)}


@dataclass(frozen=True)
class PhotoRows:
    data: str  # folder with the shards train and test
    out: str
    weights: str
    crops: int
    crew: CrewSettings
    backbone: str = LITE0
    size: int = SIZE
    epochs: int | None = None  # after the warm-up, if there is one

    def train(self, name: str, kind: PhotoSet, methods: list[str], seeds: range) -> dict[str, RowWork]:
        """method → its row, with its best trial tested under every seed."""
        rows = {method: self._row(f"{name}.{method}", kind, kind.trials[method]) for method in methods}
        if self.crew.workers != 0:  # several runs at a time would each compute what all of them need
            kinds = {example(method.candidates[0]["method"]["name"]).needs().maps: method for method in rows.values()}
            for row in kinds.values():
                fill(row.config(self.out, "fill", 0, seeds[0], True), PoolSettings(self.crew.workers))
        train_rows(list(rows.values()), self.out, seeds, self.crew)
        return rows

    def _row(self, name: str, kind: PhotoSet, trials: list[dict]) -> RowWork:
        body = self.body(trials[0].get("labels", "single"), kind)
        return RowWork(name, Row(), body, [self._settings(kind, trial) for trial in trials], f"bench quality: {name}")

    def _settings(self, kind: PhotoSet, trial: dict) -> dict:
        if not kind.tuned:
            return {"phases.1.lr": trial["lr"], "method": trial["method"]}
        classes, phases = len(ShardIndex.load(os.path.join(self.data, "train")).classes), self._phases(kind)
        settings = {f"phases.{i}.head_weight_decay": head_decay(trial["method"]["name"], trial["decay"], classes,
                                                                phase["batch"]) for i, phase in enumerate(phases)}
        return {f"phases.{len(phases) - 1}.lr": trial["lr"], "method": trial["method"], **settings}

    def body(self, labels: str, kind: PhotoSet) -> dict:
        train = os.path.join(self.data, "train")
        return {
            "name": "row", "run_folder": self.out, "method": {"name": "an"},
            "data": {"train": {"url": train, "labels": labels, "subset": "train"},
                     "val": {"url": train, "subset": "val"}, "test": {"url": os.path.join(self.data, "test")},
                     "image_size": self.size, "normalize": "centered", "streams": STREAMS, "open_shards": OPEN_SHARDS,
                     "workers": 1, "augment": {"crop": "random_resized", "flip": True}},
            "model": {"backbone": self.backbone, "weights": self.weights,
                      **(MODEL if kind.tuned else {"head_bias": "default"})},
            "phases": self._phases(kind),
            "train": {"log_every": 500, "keep": 1, "channels_last": True},
        }

    def _phases(self, kind: PhotoSet) -> list[dict]:
        frozen = {"trainable": "head", "cache": {"views": self.crops}}
        learns = {"trainable": list(kind.last)} if kind.last else {}
        if kind.tuned:
            head = {"name": "head", "epochs": self.epochs or TUNED_EPOCHS, "batch": TUNED_BATCH, "lr": TUNED_LR,
                    "schedule": SCHEDULE, **frozen}
            last = {"name": "last", "epochs": self.epochs or TUNED_LAST_EPOCHS, "batch": BATCH, **learns}
            return [head, {**head, **last}] if kind.last else [head]
        phase = {"batch": BATCH, "lr": WARM_LR, **frozen}
        return [{"name": "warm-up", "epochs": WARM_EPOCHS, **phase},
                {"name": "main", "epochs": self.epochs or (LAST_EPOCHS if kind.last else EPOCHS), **phase, **learns}]
