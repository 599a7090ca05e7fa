"""Groups in a batch of questions: of samples that belong together, such as a video's frames, only so many are asked."""

from __future__ import annotations

import numpy as np

from lacuna.data_pipelines.groups import Groups


class Quota:
    """At most `most` samples of a group; several questions about one sample count once. Without groups, no limit."""

    def __init__(self, groups: Groups | None = None, most: int = 1):
        self.groups, self.most = groups, most
        self._starts = np.zeros(0, np.int64) if groups is None else np.cumsum([0, *groups.index.counts])
        self._taken: dict[int, set[tuple[int, int]]] = {}

    def numbers(self, places: np.ndarray) -> np.ndarray:
        """The group of every place (with the fields shard and row); -1: in none."""
        if self.groups is None:
            return np.full(len(places), -1, np.int32)
        return self.groups.numbers[self._starts[places["shard"]] + places["row"]]

    def best(self, places: np.ndarray) -> np.ndarray:
        """Of every group the first `most` places, in their order; places in no group all stay."""
        numbers = self.numbers(places)
        order = np.argsort(numbers, kind="stable")
        same = numbers[order]
        # How many of its group stand before each place.
        before = np.arange(len(order)) - np.searchsorted(same, same, "left")
        keep = np.zeros(len(places), bool)
        keep[order] = (before < self.most) | (same < 0)
        return places[keep]

    def take(self, place: np.ndarray) -> bool:
        """Whether the sample may be asked about; then it counts."""
        number = int(self.numbers(place.reshape(1))[0])
        if number < 0:
            return True
        taken, sample = self._taken.setdefault(number, set()), (int(place["shard"]), int(place["row"]))
        if sample not in taken and len(taken) >= self.most:
            return False
        taken.add(sample)
        return True
