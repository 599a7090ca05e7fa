"""Sheets of heatmaps: a line per image, its strongest classes laid over it, captions that stay inside their cell."""

from __future__ import annotations

import io
import os

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from lacuna.basics import storage
from lacuna.tools.heatmaps.seen import SeenMap

_CELL = 144  # pixels of one picture
_GAP = 8
_LINE = 14  # pixels of a line of text; a caption has two
_QUIET = (110, 110, 110)
_HATCH = 8  # pixels between two lines over cells that were never seen


def draw_strip(pixels: torch.Tensor, title: str, maps: dict[int, SeenMap], names: list[str], known: set[int],
               count: int) -> Image.Image:
    """One line of the sheet: the image uint8 [3, H, W], then an overlay for each of its strongest classes."""
    picture = Image.fromarray(pixels.permute(1, 2, 0).numpy()).resize((_CELL, _CELL), Image.Resampling.BICUBIC)
    best = sorted(maps, key=lambda i: -maps[i].peak)[:count]
    strip = Image.new("RGB", ((1 + count) * (_CELL + _GAP), _CELL + 2 * _LINE + _GAP), "white")
    draw = ImageDraw.Draw(strip)
    cells = [(picture, title, "")]
    for cls in best:
        seen = maps[cls]
        notes = [f"{seen.peak:.2f}", *(["annotated"] if cls in known else []),
                 *([f"start {seen.start_share:.0%}"] if seen.start_share >= 0.005 else [])]
        cells.append((overlay(picture, seen), names[cls], ", ".join(notes)))
    for i, (shown, name, note) in enumerate(cells):
        left = i * (_CELL + _GAP)
        draw.text((left + 2, 1), fitted(draw, name, _CELL - 4), fill="black")
        draw.text((left + 2, 1 + _LINE), fitted(draw, note, _CELL - 4), fill=_QUIET)
        strip.paste(shown, (left, 2 * _LINE))
    return strip


def fitted(draw: ImageDraw.ImageDraw, text: str, width: int) -> str:
    """The text, or as much of its beginning as the width holds."""
    # Pillow's own font has no letters beyond Latin-1: others would stop the drawing where no other font is at hand.
    if isinstance(draw.getfont(), ImageFont.ImageFont):
        text = text.encode("latin-1", "replace").decode("latin-1")
    short = text
    while short and draw.textlength(short) > width:
        short = short[:-1]
    return text if short == text else short[:-2].rstrip() + ".."


def save_sheet(strips: list[Image.Image], out: str) -> None:
    """The strips below each other."""
    sheet = Image.new("RGB", (max(s.width for s in strips), sum(s.height for s in strips)), "white")
    for i, strip in enumerate(strips):
        sheet.paste(strip, (0, i * strip.height))
    buffer = io.BytesIO()
    sheet.save(buffer, Image.registered_extensions().get(os.path.splitext(out)[1].lower(), "PNG"))
    storage.write_atomic(out, buffer.getvalue())


def overlay(picture: Image.Image, seen: SeenMap) -> Image.Image:
    """Red where the map is high, over a greyed image; hatched where nothing was seen yet."""
    smooth = Image.fromarray((seen.values * 255).round().astype(np.uint8)).resize(
        picture.size, Image.Resampling.BILINEAR)
    level = np.asarray(smooth, np.float32)[..., None] / 255
    grey = np.asarray(picture.convert("L").convert("RGB"), np.float32)
    mixed = grey * (1 - 0.6 * level) + np.array([255, 40, 0]) * 0.6 * level
    if seen.unseen.any():
        hidden = np.asarray(Image.fromarray(seen.unseen).resize(picture.size, Image.Resampling.NEAREST))
        down, right = np.indices(hidden.shape)
        mixed[hidden & ((down + right) % _HATCH < 2)] = 255
    return Image.fromarray(mixed.astype(np.uint8))
