"""What the web app asks for: pages of entries, one sample with its labels and beliefs, pictures and heatmaps."""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from PIL import Image

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.decode import DecodeError, decode_image
from lacuna.data_pipelines.source import OpenShard, ShardSource
from lacuna.state_store.chunks import DamagedChunk
from lacuna.state_store.store import StateStore
from lacuna.tools.explore.columns import Beliefs, Columns
from lacuna.tools.explore.decisions import Decisions
from lacuna.tools.heatmaps import maps_of, overlay
from lacuna.tools.run_files import while_written
from lacuna.tools.select.questions import read_questions

_KEPT = 8  # shards in memory at a time, of every kind
_PAGE = 200
_SIDE = 640


class Newest:
    """Rows of the newest snapshot of a store that may still be written."""

    def __init__(self, store: StateStore):
        self.store, self.schema = store, store.schema
        self._open()

    def _open(self) -> None:
        self.reader = self.store.reader(self.store.snapshots()[-1].name)

    def read_shard(self, field: str, shard: int) -> np.ndarray:
        def again() -> np.ndarray:
            self._open()
            return self.reader.read_shard(field, shard)

        try:
            return self.reader.read_shard(field, shard)
        except DamagedChunk:
            return while_written(self.store.url, again)


class Desk:
    def __init__(self, run: str, source: ShardSource, columns: Columns, beliefs: Beliefs,
                 heat: Newest | None, decisions: Decisions):
        self.run, self.source, self.columns, self.decisions = run, source, columns, decisions
        self.heat = heat
        self.opened = Kept(source.open)
        self.believed = Kept(beliefs)

    def overview(self) -> dict[str, Any]:
        index = self.source.index
        found = self.columns.places["missing"]["shard"]
        suggestions = (np.asarray(found) >= 0).sum(axis=1)
        annotated = np.diff(self.columns.starts)
        return {"run": self.run, "samples": int(self.source.rows.sum()), "kind": index.kind,
                "heatmaps": self.heat is not None, "origin": self.columns.facts["origin"],
                "labels": self.source.sidecar.name, "counts": self.decisions.counts(),
                "classes": [{"name": name, "annotated": int(annotated[i]), "missing": int(suggestions[i])}
                            for i, name in enumerate(index.classes)]}

    def page(self, view: str, cls: int | None, start: int, count: int) -> dict[str, Any]:
        if view not in ("missing", "disagree", "annotated", "questions") or (view == "annotated" and cls is None):
            raise UserError(f"view {view!r}: legal are missing, disagree, questions, and annotated with a class.")
        self._check_class(cls)
        start, count = max(0, start), min(max(1, count), _PAGE)
        total, items = (self._questions(cls, start, count) if view == "questions"
                        else self.columns.list(view, cls, start, count))
        for item in items:
            item["name"] = self.source.index.classes[item["class"]]
            item["decision"] = self.decisions.made.get((item["shard"], item["row"], item["class"]))
        return {"total": total, "start": start, "items": items}

    def sample(self, shard: int, row: int) -> dict[str, Any]:
        opened, names = self._open(shard, row), self.source.index.classes
        found = self.believed.get(shard)
        top = []
        if found is not None and row in found[1]:
            values = found[0][int(np.searchsorted(found[1], row))]
            top = [{"class": int(c), "name": names[c], "score": float(values[c])} for c in np.argsort(-values)[:9]]
        maps = sorted(maps_of(self.heat, shard, [row])[0]) if self._has_heat(shard) and self.heat else []
        return {"key": opened.members.keys[row], "positives": [names[i] for i in opened.labels.positives(row)],
                "negatives": [names[i] for i in opened.labels.negatives(row)], "top": top, "maps": maps[:1000],
                "decisions": [{"class": c, "name": names[c], "decision": word}
                              for (s, r, c), word in self.decisions.made.items() if (s, r) == (shard, row)]}

    def picture(self, shard: int, row: int, side: int, cls: int | None = None) -> bytes:
        """A JPEG at most so large; with a class, its heatmap laid over."""
        opened = self._open(shard, row)
        if self.source.index.kind != "image":
            raise UserError("this dataset holds feature vectors: there is no picture.")
        try:
            pixels = decode_image(opened.read(row)).permute(1, 2, 0).numpy()
        except DecodeError as error:
            raise UserError(f"{opened.members.keys[row]}: {error}.") from None
        picture = Image.fromarray(pixels)
        picture.thumbnail((min(side, _SIDE), min(side, _SIDE)))
        if cls is not None:
            self._check_class(cls)
            maps = maps_of(self.heat, shard, [row])[0] if self._has_heat(shard) and self.heat else {}
            if cls not in maps:
                raise UserError(f"no heatmap of class {cls} is kept for this sample.")
            # Small images are enlarged: a heatmap over 32 pixels cannot be read.
            if max(picture.size) < 256:
                scale = 256 / max(picture.size)
                picture = picture.resize((round(picture.width * scale), round(picture.height * scale)))
            picture = overlay(picture, maps[cls])
        buffer = io.BytesIO()
        picture.convert("RGB").save(buffer, "JPEG", quality=85)
        return buffer.getvalue()

    def export(self, kind: str, name: str) -> dict[str, Any]:
        if not self.decisions.made:
            raise UserError("nothing was decided yet: accept or reject some suggestions first.")
        if kind == "sidecar":
            count = self.decisions.save_sidecar(name)
            return {"written": f"sidecar {name}", "entries": count, "use": f"data.train.labels={name}"}
        if kind not in ("csv", "parquet"):
            raise UserError(f"export {kind!r}: legal are csv, parquet, sidecar.")
        path = os.path.join(os.path.dirname(self.decisions.path), f"decisions.{kind}")
        return {"written": path, "entries": self.decisions.save_table(path), "use": ""}

    def _questions(self, cls: int | None, start: int, count: int) -> tuple[int, list[dict[str, Any]]]:
        """What `lacuna select` asked last, in its order; read each time, so that a new selection shows at once."""
        asked = read_questions(os.path.dirname(self.decisions.path), self.source.sidecar.name)
        asked = [item for item in asked if cls is None or item["class"] == cls]
        return len(asked), asked[start : start + count]

    def _open(self, shard: int, row: int) -> OpenShard:
        shards = self.source.index.shards
        if not (0 <= shard < len(shards) and 0 <= row < shards[shard].rows):
            raise UserError(f"no sample {shard}/{row}: there are shards 0..{len(shards) - 1}.")
        return self.opened.get(shard)

    def _has_heat(self, shard: int) -> bool:
        name = "heat" if self.heat and "heat" in self.heat.schema.fields else "heat_values"
        return self.heat is not None and self.heat.reader.refs.get(name, {}).get(shard) is not None

    def _check_class(self, cls: int | None) -> None:
        if cls is not None and not 0 <= cls < self.source.classes:
            raise UserError(f"class {cls}: there are classes 0..{self.source.classes - 1}.")


class Kept:
    """The last few answers of a function of a shard number; several threads may ask."""

    def __init__(self, make: Callable[[int], Any]):
        self._make, self._lock = make, threading.Lock()
        self._found: OrderedDict[Hashable, Any] = OrderedDict()

    def get(self, shard: int) -> Any:
        with self._lock:
            if shard not in self._found:
                self._found[shard] = self._make(shard)
                if len(self._found) > _KEPT:
                    self._found.popitem(last=False)
            self._found.move_to_end(shard)
            return self._found[shard]
