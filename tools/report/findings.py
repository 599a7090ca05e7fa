"""Pictures worth showing: the surest labels that nobody gave, right ones and, where the truth is known, a wrong one.

Legend: n samples of a shard, L classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from PIL import Image

from lacuna.data_pipelines.decode import DecodeError, decode_image
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.heatmaps.drawing import overlay
from lacuna.tools.heatmaps.seen import Looks, keeps_heatmaps, maps_of
from lacuna.tools.report.recorded_run import Lacks, RecordedRun
from lacuna.tools.report.strips import data_uri
from lacuna.tools.run_files import step_of

_SIDE = 300
PICTURES = 3
VERDICTS = {POSITIVE: "right", NEGATIVE: "wrong", UNKNOWN: "not checked"}


@dataclass(frozen=True)
class Finding:
    belief: float
    shard: int
    row: int
    cls: int
    truth: int


@dataclass
class Surest:
    """Of every class the unknown entry with the highest belief, for each truth apart."""

    best: dict[tuple[int, int], Finding] = field(default_factory=dict)  # class, truth → finding

    def offer(self, shard: int, rows: np.ndarray, beliefs: np.ndarray, known: np.ndarray,
              truth: np.ndarray | None) -> None:
        """Of beliefs and labels [n, L] of a shard's rows."""
        truths = np.full_like(known, UNKNOWN) if truth is None else truth
        for value in (POSITIVE, NEGATIVE, UNKNOWN):
            open_beliefs = np.where((known == UNKNOWN) & (truths == value), beliefs, -1.0)
            highest = open_beliefs.argmax(axis=0)
            for cls, at in enumerate(highest.tolist()):
                belief, before = float(open_beliefs[at, cls]), self.best.get((cls, value))
                if belief >= 0 and (before is None or belief > before.belief):
                    self.best[cls, value] = Finding(belief, shard, int(rows[at]), cls, value)

    def pick(self) -> list[Finding]:
        """Three of different classes and images: with the truth two right ones and the surest error, if it is one."""
        falling = sorted(self.best.values(), key=lambda f: -f.belief)
        right = _apart([], [f for f in falling if f.truth != NEGATIVE])
        two = right[: PICTURES - 1]
        with_error = _apart(two, [f for f in falling if f.truth == NEGATIVE and f.belief >= 0.5])
        return (with_error if len(with_error) > len(two) else right)[:PICTURES]


def _apart(chosen: list[Finding], offered: list[Finding]) -> list[Finding]:
    """The chosen ones and those offered that share neither class nor image with one before them."""
    found = list(chosen)
    for one in offered:
        if all(one.cls != f.cls and (one.shard, one.row) != (f.shard, f.row) for f in found):
            found.append(one)
    return found


def pictures_of(folder: RecordedRun, found: list[Finding], lacks: Lacks) -> list[dict[str, Any]]:
    """What the headline shows of each: the image, its heatmap of the class if the run keeps one, labels and belief."""
    source = folder.train
    if source is None or source.index.kind != "image":
        if found:
            lacks("pictures in the headline", "the training set holds feature vectors, not images.")
        return []
    shown = []
    for one in found:
        opened = source.open(one.shard)
        try:
            image = decode_image(opened.read(one.row))
        except DecodeError:
            continue
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        scale = _SIDE / max(picture.size)
        picture = picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale))),
                                 Image.Resampling.BICUBIC)
        heat = _heat(folder, source, one, image, picture)
        names = source.index.classes
        shown.append({"picture": data_uri(picture), "heat": data_uri(heat) if heat else None,
                      "key": opened.members.keys[one.row], "name": names[one.cls], "belief": one.belief,
                      "verdict": VERDICTS[one.truth],
                      "annotated": [names[int(c)] for c in opened.labels.positives(one.row)]})
    return shown


def _heat(folder: RecordedRun, source: ShardSource, one: Finding, image, picture: Image.Image) -> Image.Image | None:
    store = folder.store
    if store is None or not keeps_heatmaps(store) or not store.snapshots():
        return None
    newest = store.snapshots()[-1].name
    reader = store.reader(newest)
    maps = {cls: kept for cls, kept in maps_of(reader, one.shard, [one.row])[0].items() if cls == one.cls}
    seen = Looks(folder.config, source).seen(maps, reader, one.shard, one.row, image, step_of(newest))
    return overlay(picture, seen[one.cls]) if one.cls in seen else None
