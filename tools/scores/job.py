"""The pass of `lacuna scores`: an outside model over one shard after another, and its parts as a store of tables.

Legend: n readable rows of a shard, V views of an image, L classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from lacuna.basics.hashing import mix
from lacuna.data_pipelines.batch import BadSample
from lacuna.data_pipelines.decode import DecodeError, decode_image
from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store.fields import Field
from lacuna.state_store.moving import BulkWriter
from lacuna.tools.import_scores import SNAPSHOT, new_store
from lacuna.tools.passes.parts import Parts, fingerprint_of
from lacuna.tools.passes.scoring import Arrays, data_facts, pack_bad
from lacuna.tools.passes.trained import Trained, load_model
from lacuna.tools.scores.looking import Look, Views, combined
from lacuna.trainer.methods import score_of

_VIEWS = 64  # in one forward
Scores = Callable[[torch.Tensor], torch.Tensor]  # pixels [V, 3, S, S] → [V, L]


class Outside(Protocol):
    """A model from elsewhere; small enough to be sent to every worker, its weights stay in their file."""

    @property
    def facts(self) -> dict: ...

    def load(self, device: torch.device) -> tuple[Look, Scores]: ...


@dataclass(frozen=True)
class OwnModel:
    """One of our runs, looked at through crops."""

    trained: Trained
    source: ShardSource

    @property
    def facts(self) -> dict:
        data = self.trained.config.data
        return {"weights": self.trained.digest, "inputs": [data.image_size, data.normalize]}

    def load(self, device: torch.device) -> tuple[Look, Scores]:
        model, score = load_model(self.trained, self.source, device), score_of(self.trained.config.method)
        return Look(self.trained.config.data.image_size), lambda pixels: score(model(pixels)[0], model.head.bias)


@dataclass(frozen=True)
class OutsideJob:
    """Parts with one float32 [n, L] per table, `rows` and `bad`. Labels play no part in it."""

    model: Outside
    source: ShardSource
    views: Views

    @property
    def fingerprint(self) -> str:
        views = [self.views.fit, self.views.grid, self.views.random, self.views.seed]
        return fingerprint_of(job="outside scores", model=self.model.facts, views=views, batch=_VIEWS,
                              **data_facts(self.source))

    def build(self) -> Callable[[int], Arrays]:
        torch.set_num_threads(1)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        look, scores = self.model.load(device)

        def work(shard: int) -> Arrays:
            found: dict[str, list[np.ndarray]] = {name: [] for name in self.views.tables}
            rows, bad = list[int](), list[BadSample]()
            with torch.no_grad():
                for some, views in self._images(shard, look, device, bad):
                    pixels = look.pixels(torch.cat(views).to(device))
                    tables = combined(scores(pixels).view(len(some), -1, self.source.classes), self.views)
                    for name, values in tables.items():
                        found[name].append(values.float().cpu().numpy())
                    rows += some
            none = np.zeros((0, self.source.classes), np.float32)
            return {**{name: np.concatenate([none, *parts]) for name, parts in found.items()},
                    "rows": np.array(rows, np.int64), "bad": pack_bad(bad)}

        return work

    def _images(self, shard: int, look: Look, device: torch.device,
                bad: list[BadSample]) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
        """(rows, their views), batch by batch, of what can be decoded; by several threads where a GPU would wait."""
        opened = self.source.open(shard)
        used = opened.used.tolist()
        together = max(1, _VIEWS // (1 + self.views.grid**2 + self.views.random))

        def views(row: int) -> torch.Tensor | str:
            try:
                return self.views.of(decode_image(opened.read(row)), look, mix(shard, row))
            except DecodeError as error:
                return str(error)

        with ThreadPoolExecutor(8 if device.type == "cuda" else 1) as threads:
            for start in range(0, len(used), together):
                some = used[start : start + together]
                made = dict(zip(some, threads.map(views, some), strict=True))
                bad += [BadSample(opened.url, row, opened.members.keys[row], reason)
                        for row, reason in made.items() if isinstance(reason, str)]
                good = {row: pixels for row, pixels in made.items() if not isinstance(pixels, str)}
                if good:
                    yield list(good), list(good.values())


def write_tables(url: str, index: ShardIndex, parts: Parts, shards: list[int], tables: tuple[str, ...], dtype: str,
                 facts: dict) -> None:
    """A store as `lacuna import-scores` makes it; rows that were not looked at are 0."""
    fields = [Field(name, (len(index.classes),), dtype) for name in tables]
    writer = BulkWriter(new_store(url, index, fields))
    for shard, count in enumerate(index.counts):
        part = parts.read(shard) if shard in shards else None
        for name in tables:
            rows = np.zeros((int(count), len(index.classes)), dtype)
            if part is not None:
                rows[part["rows"]] = part[name]
            writer.write(name, shard, rows)
    writer.commit(SNAPSHOT, facts)
