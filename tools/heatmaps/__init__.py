"""Draws the running heatmaps that SCL keeps about training images: each image beside its strongest classes.

The map of an annotated class starts at 1 everywhere. What is left of that start is taken out, so that the colour shows
what the model saw; cells that no crop has held yet are hatched.

  lacuna heatmaps runs/my-run --out heatmaps.png
  lacuna heatmaps runs/my-run --shard 3 --rows 0 5 17 --classes 4 --snapshot step-00000500
"""

from __future__ import annotations

import argparse
import json

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.decode import decode_image
from lacuna.tools.heatmaps.drawing import draw_strip, save_sheet
from lacuna.tools.heatmaps.seen import Looks, keeps_heatmaps, maps_of
from lacuna.tools.run_files import run_config, state_url, step_of, while_written
from lacuna.trainer.config.sections import Config
from lacuna.trainer.training_data import training_source


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run folder (or URL) of a method with score maps (en_scl, …)")
    parser.add_argument("--out", default="heatmaps.png", help="PNG to write (default: heatmaps.png)")
    parser.add_argument("--shard", type=int, default=0, help="number of the shard (default: 0)")
    parser.add_argument("--rows", type=int, nargs="+", help="rows of the shard (default: the first eight)")
    parser.add_argument("--classes", type=int, default=4, help="strongest classes shown per image (default 4)")
    parser.add_argument("--snapshot", help="name of a snapshot (default: the last checkpoint's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the path")


def run(args: argparse.Namespace) -> None:
    rows = while_written(args.run, lambda: draw_heatmaps(run_config(args.run), args.run, args.out, args.shard,
                                                         args.rows, args.classes, args.snapshot))
    print(json.dumps({"out": args.out, "shard": args.shard, "rows": rows}) if args.json else args.out)


def draw_heatmaps(config: Config, folder: str, out: str, shard: int, rows: list[int] | None, classes: int,
                  snapshot: str | None = None) -> list[int]:
    """The rows that were drawn: those given, or the first ones of the shard that were trained on."""
    source = training_source(config)
    store = state_store.open(state_url(folder, config))
    if not keeps_heatmaps(store):
        raise UserError(f"{folder}: its method keeps no heatmaps (fields: {', '.join(store.schema.fields)}). "
                        "Use a run of a method that ends in _scl.")
    names = [entry.name for entry in store.snapshots()]
    if not names or (snapshot or names[-1]) not in names:
        raise UserError(f"{folder}: no snapshot {snapshot!r}; there are: {', '.join(names) or 'none'}.")
    if rows is None:
        rows = source.open(shard).used[:8].tolist() if 0 <= shard < len(source.index.shards) else []
    if not 0 <= shard < len(source.index.shards) or not all(0 <= r < source.index.shards[shard].count for r in rows):
        raise UserError(f"--shard {shard} --rows {rows}: the set has shards 0..{len(source.index.shards) - 1}, "
                        f"with rows 0..{source.index.shards[min(shard, len(source.index.shards) - 1)].count - 1}.")
    chosen = snapshot or names[-1]
    reader, looks, opened, strips = store.reader(chosen), Looks(config, source), source.open(shard), []
    for row, maps in zip(rows, maps_of(reader, shard, rows), strict=True):
        image = decode_image(opened.read(row))
        seen = looks.seen(maps, reader, shard, row, image, step_of(chosen))
        strips.append(draw_strip(image, opened.members.keys[row], seen, source.index.classes,
                                 {int(c) for c in opened.labels.positives(row)}, classes))
    save_sheet(strips, out)
    return rows
