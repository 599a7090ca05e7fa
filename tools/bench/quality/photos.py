"""The photo sets of `bench quality`: rows on a fixed ImageNet backbone over random crops, trained as by `lacuna table`.

Phases have a cache, so dozens of heads share the backbone's forward passes, which are nearly all of the work. Schedule,
as in Verelst et al.: a warm-up, in which EN, CL and SCL are still AN (start_phase), then the method, whose best epoch
is chosen on the validation photos; other methods are themselves from the first epoch on. In the set photos_tuned the
last blocks of the backbone learn with the head after the warm-up.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from lacuna.tools.bench.quality.lite0 import LITE0, LITE0_LAST, SIZE
from lacuna.tools.cache.filling import fill
from lacuna.tools.passes.pool import PoolSettings
from lacuna.tools.table.rows import RowWork
from lacuna.tools.table.work import train_rows
from lacuna.tools.trials.crew import CrewSettings
from lacuna.trainer.config.tables import Row
from lacuna.trainer.methods import example

BATCH, STREAMS, OPEN_SHARDS = 32, 4, 2
WARM_EPOCHS, EPOCHS, TUNED_EPOCHS, WARM_LR = 5, 11, 5, 2e-3


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


@dataclass(frozen=True)
class PhotoRows:
    data: str  # folder with the shards train and test
    out: str
    weights: str
    crops: int
    crew: CrewSettings
    backbone: str = LITE0
    size: int = SIZE
    last: tuple[str, ...] = LITE0_LAST
    epochs: int | None = None  # after the warm-up

    def train(self, name: str, methods: dict[str, list[dict]], seeds: range, tuned: bool) -> dict[str, RowWork]:
        """method → its row, with its best trial tested under every seed; `methods`: what is tried of each."""
        rows = {method: self._row(f"{name}.{method}", trials, tuned) for method, trials in methods.items()}
        if self.crew.workers != 0:  # several runs at a time would each compute what all of them need
            kinds = {example(method.candidates[0]["method"]["name"]).needs().maps: method for method in rows.values()}
            for row in kinds.values():
                fill(row.config(self.out, "fill", 0, seeds[0], True), PoolSettings(self.crew.workers))
        train_rows(list(rows.values()), self.out, seeds, self.crew)
        return rows

    def _row(self, name: str, trials: list[dict], tuned: bool) -> RowWork:
        settings = [{"phases.1.lr": trial["lr"], "method": trial["method"]} for trial in trials]
        return RowWork(name, Row(), self.body(trials[0]["labels"], tuned), settings, f"bench quality: {name}")

    def body(self, labels: str, tuned: bool) -> dict:
        train = os.path.join(self.data, "train")
        phase = {"batch": BATCH, "lr": WARM_LR, "trainable": "head", "cache": {"views": self.crops}}
        epochs = self.epochs or (TUNED_EPOCHS if tuned else EPOCHS)
        learns = {"trainable": list(self.last)} if tuned else {}
        return {
            "name": "row", "run_folder": self.out, "method": {"name": "an"},
            "data": {"train": {"url": train, "labels": labels, "subset": "train"},
                     "val": {"url": train, "subset": "val"}, "test": {"url": os.path.join(self.data, "test")},
                     "image_size": self.size, "normalize": "centered", "streams": STREAMS, "open_shards": OPEN_SHARDS,
                     "workers": 1, "augment": {"crop": "random_resized", "flip": True}},
            "model": {"backbone": self.backbone, "weights": self.weights, "head_bias": "default"},
            "phases": [{"name": "warm-up", "epochs": WARM_EPOCHS, **phase},
                       {"name": "main", "epochs": epochs, **phase, **learns}],
            "train": {"log_every": 500, "keep": 1, "channels_last": True},
        }
