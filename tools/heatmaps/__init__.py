"""Draws where a model sees classes in training images: each image beside its strongest classes.

Methods with SCL keep running heatmaps of every sample, and those are drawn. The map of an annotated class starts at 1
everywhere. What is left of that start is taken out, so that the colour shows what the model saw; cells that no crop has
held yet are hatched. Of any other method the trained model's own score maps are drawn, as it sees the whole image now.

  lacuna heatmaps runs/my-run --out heatmaps.png
  lacuna heatmaps runs/my-run --shard 3 --rows 0 5 17 --classes 4 --snapshot step-00000500
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.decode import decode_image
from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store.schema import is_store
from lacuna.state_store.store import StateStore
from lacuna.tools.heatmaps.drawing import draw_strip, save_sheet
from lacuna.tools.heatmaps.now import maps_now
from lacuna.tools.heatmaps.seen import Looks, SeenMap, keeps_heatmaps, maps_of
from lacuna.tools.run_files import run_config, state_url, step_of, while_written
from lacuna.trainer.config.sections import Config
from lacuna.trainer.training_data import training_source

if TYPE_CHECKING:
    import torch


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run folder (or URL) of a run on images")
    parser.add_argument("--out", default="heatmaps.png", help="PNG to write (default: heatmaps.png)")
    parser.add_argument("--shard", type=int, default=0, help="number of the shard (default: 0)")
    parser.add_argument("--rows", type=int, nargs="+", help="rows of the shard (default: the first eight)")
    parser.add_argument("--classes", type=int, default=4, help="strongest classes shown per image (default 4)")
    parser.add_argument("--snapshot", help="name of a snapshot of kept heatmaps (default: the last one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the path")


def run(args: argparse.Namespace) -> None:
    rows = while_written(args.run, lambda: draw_heatmaps(run_config(args.run), args.run, args.out, args.shard,
                                                         args.rows, args.classes, args.snapshot))
    print(json.dumps({"out": args.out, "shard": args.shard, "rows": rows}) if args.json else args.out)


def draw_heatmaps(config: Config, folder: str, out: str, shard: int, rows: list[int] | None, classes: int,
                  snapshot: str | None = None) -> list[int]:
    """The rows that were drawn: those given, or the first ones of the shard that were trained on."""
    source = training_source(config)
    if rows is None:
        rows = source.open(shard).used[:8].tolist() if 0 <= shard < len(source.index.shards) else []
    if not 0 <= shard < len(source.index.shards) or not all(0 <= r < source.index.shards[shard].count for r in rows):
        raise UserError(f"--shard {shard} --rows {rows}: the set has shards 0..{len(source.index.shards) - 1}, "
                        f"with rows 0..{source.index.shards[min(shard, len(source.index.shards) - 1)].count - 1}.")
    if source.index.kind != "image":
        raise UserError(f"{folder}: its samples are features, not images, so there is nothing to draw on. Use a run on "
                        "image shards.")
    opened = source.open(shard)
    images = [decode_image(opened.read(row)) for row in rows]
    kept = _kept(config, folder)
    if kept is None and snapshot is not None:
        raise UserError(f"--snapshot {snapshot}: the method {config.method['name']!r} of {folder} keeps no heatmaps. "
                        "Leave the flag out to draw what the trained model sees now, or use a run of a method that "
                        "ends in _scl.")
    maps = (maps_now(folder, source, images) if kept is None
            else _seen_before(kept, config, source, shard, rows, images, snapshot, folder))
    save_sheet([draw_strip(image, opened.members.keys[row], seen, source.index.classes,
                           {int(c) for c in opened.labels.positives(row)}, classes)
                for row, image, seen in zip(rows, images, maps, strict=True)], out)
    return rows


def _kept(config: Config, folder: str) -> StateStore | None:
    """The store with the run's heatmaps, if its method keeps any."""
    url = state_url(folder, config)
    store = state_store.open(url) if is_store(url) else None
    return store if store is not None and keeps_heatmaps(store) else None


def _seen_before(store: StateStore, config: Config, source: ShardSource, shard: int, rows: list[int],
                 images: list[torch.Tensor], snapshot: str | None, folder: str) -> list[dict[int, SeenMap]]:
    names = [entry.name for entry in store.snapshots()]
    if not names or (snapshot or names[-1]) not in names:
        raise UserError(f"{folder}: no snapshot {snapshot!r}; there are: {', '.join(names) or 'none'}.")
    chosen = snapshot or names[-1]
    reader, looks = store.reader(chosen), Looks(config, source)
    return [looks.seen(maps, reader, shard, row, image, step_of(chosen))
            for row, image, maps in zip(rows, images, maps_of(reader, shard, rows), strict=True)]
