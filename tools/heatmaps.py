"""Draws the running heatmaps that SCL keeps about training images: each image beside its strongest classes.

  lacuna heatmaps runs/my-run --out heatmaps.png
  lacuna heatmaps runs/my-run --shard 3 --rows 0 5 17 --classes 4 --snapshot step-00000500
"""

from __future__ import annotations

import argparse
import io
import json
import os

import numpy as np
import torch
from PIL import Image, ImageDraw

from lacuna import state_store
from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.decode import decode_image
from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store.store import StateStore
from lacuna.state_store.sweep import Reader
from lacuna.state_store.topk import UNTRACKED
from lacuna.tools.run_files import run_config, state_url, while_written
from lacuna.trainer.config.sections import Config

_CELL = 128  # pixels of one picture
_TEXT = 14


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run folder (or URL) of a method with score maps (en_scl, …)")
    parser.add_argument("--out", default="heatmaps.png", help="PNG to write (default: heatmaps.png)")
    parser.add_argument("--shard", type=int, default=0, help="number of the shard (default: 0)")
    parser.add_argument("--rows", type=int, nargs="+", default=list(range(8)), help="rows of the shard (default: 0-7)")
    parser.add_argument("--classes", type=int, default=4, help="strongest classes shown per image (default 4)")
    parser.add_argument("--snapshot", help="name of a snapshot (default: the last checkpoint's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the path")


def run(args: argparse.Namespace) -> None:
    while_written(args.run, lambda: draw_heatmaps(run_config(args.run), args.run, args.out, args.shard, args.rows,
                                                  args.classes, args.snapshot))
    print(json.dumps({"out": args.out, "shard": args.shard, "rows": args.rows}) if args.json else args.out)


def draw_heatmaps(config: Config, folder: str, out: str, shard: int, rows: list[int], classes: int,
                  snapshot: str | None = None) -> None:
    source = ShardSource.load(config.data.train.url, config.data.train.labels, None)
    store = state_store.open(state_url(folder, config))
    if not keeps_heatmaps(store):
        raise UserError(f"{folder}: its method keeps no heatmaps (fields: {', '.join(store.schema.fields)}). "
                        "Use a run of a method that ends in _scl.")
    names = [entry.name for entry in store.snapshots()]
    if not names or (snapshot or names[-1]) not in names:
        raise UserError(f"{folder}: no snapshot {snapshot!r}; there are: {', '.join(names) or 'none'}.")
    if not 0 <= shard < len(source.index.shards) or not all(0 <= r < source.index.shards[shard].rows for r in rows):
        raise UserError(f"--shard {shard} --rows {rows}: the set has shards 0..{len(source.index.shards) - 1}, "
                        f"with rows 0..{source.index.shards[min(shard, len(source.index.shards) - 1)].rows - 1}.")
    maps = maps_of(store.reader(snapshot or names[-1]), shard, rows)
    opened = source.open(shard)
    strips = [draw_strip(decode_image(opened.read(row)), opened.members.keys[row], maps[i], source.index.classes,
                         {int(c) for c in opened.labels.positives(row)}, classes) for i, row in enumerate(rows)]
    save_sheet(strips, out)


def keeps_heatmaps(store: StateStore) -> bool:
    return "heat" in store.schema.fields or "heat_values" in store.schema.fields


def maps_of(reader: Reader, shard: int, rows: list[int]) -> list[dict[int, np.ndarray]]:
    """For each row, class id → heatmap uint8 [W, W]; never-visited top-k samples have none."""
    if "heat" in reader.schema.fields:
        return [dict(enumerate(maps)) for maps in reader.read_shard("heat", shard)[rows]]
    ids, values = reader.read_shard("heat_ids", shard)[rows], reader.read_shard("heat_values", shard)[rows]
    return [{int(i): value for i, value in zip(*pair, strict=True) if i != UNTRACKED}
            for pair in zip(ids, values, strict=True)]


def draw_strip(pixels: torch.Tensor, title: str, maps: dict[int, np.ndarray], names: list[str], known: set[int],
               count: int) -> Image.Image:
    """One line of the sheet: the image uint8 [3, H, W], then an overlay for each of its strongest classes."""
    picture = Image.fromarray(pixels.permute(1, 2, 0).numpy()).resize((_CELL, _CELL), Image.Resampling.BICUBIC)
    best = sorted(maps, key=lambda i: -float(maps[i].max()))[:count]
    strip = Image.new("RGB", ((1 + count) * _CELL, _CELL + _TEXT), "white")
    strip.paste(picture, (0, _TEXT))
    draw = ImageDraw.Draw(strip)
    draw.text((2, 1), title, fill="black")
    for i, cls in enumerate(best, 1):
        strip.paste(overlay(picture, maps[cls]), (i * _CELL, _TEXT))
        mark = " (annotated)" if cls in known else ""
        draw.text((i * _CELL + 2, 1), f"{names[cls]} {maps[cls].max() / 255:.2f}{mark}", fill="black")
    return strip


def save_sheet(strips: list[Image.Image], out: str) -> None:
    """The strips below each other."""
    sheet = Image.new("RGB", (max(s.width for s in strips), sum(s.height for s in strips)), "white")
    for i, strip in enumerate(strips):
        sheet.paste(strip, (0, i * strip.height))
    buffer = io.BytesIO()
    sheet.save(buffer, Image.registered_extensions().get(os.path.splitext(out)[1].lower(), "PNG"))
    storage.write_atomic(out, buffer.getvalue())


def overlay(picture: Image.Image, heat: np.ndarray) -> Image.Image:
    """Red where the map is high, over a greyed image."""
    smooth = Image.fromarray(heat).resize(picture.size, Image.Resampling.BILINEAR)
    level = np.asarray(smooth, np.float32)[..., None] / 255
    grey = np.asarray(picture.convert("L").convert("RGB"), np.float32)
    return Image.fromarray((grey * (1 - 0.6 * level) + np.array([255, 40, 0]) * 0.6 * level).astype(np.uint8))
