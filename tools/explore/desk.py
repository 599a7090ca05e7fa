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
from lacuna.tools.explore.decisions import Action, Decisions, Entry
from lacuna.tools.explore.sharing import Sharing
from lacuna.tools.heatmaps.drawing import overlay
from lacuna.tools.heatmaps.seen import Looks, maps_of
from lacuna.tools.run_files import step_of, while_written
from lacuna.tools.select.questions import read_questions

_KEPT = 8  # shards in memory at a time, of every kind
_PAGE = 200
_COUNTED = 20_000  # entries of a list among which decided ones are counted
_VIEWS = ("missing", "disagree", "annotated", "questions", "conflicts", "second")
_SIDE = 640


class Newest:
    """Rows of the newest snapshot of a store that may still be written."""

    def __init__(self, store: StateStore):
        self.store, self.schema = store, store.schema
        self._open()

    def _open(self) -> None:
        name = self.store.snapshots()[-1].name
        self.reader, self.step = self.store.reader(name), step_of(name)

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
                 heat: Newest | None, looks: Looks, decisions: Decisions, shared: bool = False):
        self.looks, self.shared = looks, shared
        self.run, self.source, self.columns, self.decisions = run, source, columns, decisions
        self.heat, self.sharing = heat, Sharing(decisions)
        self.opened = Kept(source.open)
        self.believed = Kept(beliefs)

    def overview(self, who: str) -> dict[str, Any]:
        index = self.source.index
        found = self.columns.places["missing"]["shard"]
        suggestions = (np.asarray(found) >= 0).sum(axis=1)
        annotated = np.diff(self.columns.starts)
        return {"run": self.run, "samples": int(self.source.counts.sum()), "kind": index.kind,
                "heatmaps": self.heat is not None, "origin": self.columns.facts["origin"],
                "labels": self.source.sidecar.name, "counts": self.decisions.counts(),
                "recent": self.decisions.recent(who), "shared": self.shared,
                "classes": [{"name": name, "annotated": int(annotated[i]), "missing": int(suggestions[i])}
                            for i, name in enumerate(index.classes)]}

    def page(self, view: str, cls: int | None, start: int, count: int, who: str = "") -> dict[str, Any]:
        """So many entries from a place on that others are not at work on, and the place to go on from."""
        if view not in _VIEWS or (view == "annotated" and cls is None):
            raise UserError(f"view {view!r}: legal are {', '.join(_VIEWS)}; annotated needs a class.")
        self._check_class(cls)
        start, count = max(0, start), min(max(1, count), _PAGE)
        shared, items, place = view not in ("conflicts", "second"), list[dict[str, Any]](), start
        while True:
            total, found = self._list(view, cls, place, count, who)
            for item in found:
                if len(items) == count:
                    break
                entry = (item["shard"], item["row"], item["class"])
                if not shared or self.sharing.take(entry, who):
                    items.append({**item, "place": place, **self._said(entry, who)})
                place += 1
            if not found or len(items) == count:
                break
        return {"total": total, "items": items, "next": place, "decided": self._decided(view, cls, who, total),
                "counts": self.decisions.counts()}

    def _list(self, view: str, cls: int | None, start: int, count: int, who: str) -> tuple[int, list[dict[str, Any]]]:
        if view == "questions":
            return self._questions(cls, start, count)
        if view in ("conflicts", "second"):
            entries = self.decisions.conflicts() if view == "conflicts" else self.decisions.second_looks(who)
            entries = [entry for entry in entries if cls is None or entry[2] == cls]
            return len(entries), [{"shard": s, "row": r, "class": c, "score": None}
                                  for s, r, c in entries[start : start + count]]
        return self.columns.list(view, cls, start, count)

    def _said(self, entry: Entry, who: str) -> dict[str, Any]:
        votes = self.decisions.votes.get(entry, {})
        return {"name": self.source.index.classes[entry[2]], "decision": votes.get(who),
                "others": {name or "somebody": word for name, word in votes.items() if name != who}}

    def _decided(self, view: str, cls: int | None, who: str, total: int) -> int | None:
        """Entries of the list that somebody has decided; None if there are too many to look."""
        if total > _COUNTED or view in ("conflicts", "second"):
            return None
        _, items = self._list(view, cls, 0, total, who)
        return sum((item["shard"], item["row"], item["class"]) in self.decisions.made for item in items)

    def decide(self, who: str, actions: list[Action]) -> dict[str, Any]:
        """What the page shows afterwards; of undone and redone votes, where they were made and what holds now."""
        steps = self.decisions.act(actions)
        moved = [{"shard": action.entry[0], "row": action.entry[1], "class": action.entry[2], "view": action.view,
                  "list_class": action.list_class, "place": action.place,
                  "decision": self.decisions.votes.get(action.entry, {}).get(who)}
                 for action in (step.action for step in steps) if action.entry is not None]
        return {"counts": self.decisions.counts(), "recent": self.decisions.recent(who), "moved": moved}

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
                "decisions": [{"class": c, "name": names[c], "votes": votes}
                              for c in range(len(names)) if (votes := self.decisions.votes.get((shard, row, c)))]}

    def picture(self, shard: int, row: int, side: int, cls: int | None = None) -> bytes:
        """A JPEG at most so large; with a class, its heatmap laid over."""
        opened = self._open(shard, row)
        if self.source.index.kind != "image":
            raise UserError("this dataset holds feature vectors: there is no picture.")
        try:
            image = decode_image(opened.read(row))
        except DecodeError as error:
            raise UserError(f"{opened.members.keys[row]}: {error}.") from None
        picture = Image.fromarray(image.permute(1, 2, 0).numpy())
        picture.thumbnail((min(side, _SIDE), min(side, _SIDE)))
        if cls is not None:
            self._check_class(cls)
            maps = maps_of(self.heat, shard, [row])[0] if self._has_heat(shard) and self.heat else {}
            if self.heat is None or cls not in maps:
                raise UserError(f"no heatmap of class {cls} is kept for this sample.")
            # Small images are enlarged: a heatmap over 32 pixels cannot be read.
            if max(picture.size) < 256:
                scale = 256 / max(picture.size)
                picture = picture.resize((round(picture.width * scale), round(picture.height * scale)))
            seen = self.looks.seen({cls: maps[cls]}, self.heat, shard, row, image, self.heat.step)
            picture = overlay(picture, seen[cls])
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
        if not (0 <= shard < len(shards) and 0 <= row < shards[shard].count):
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
