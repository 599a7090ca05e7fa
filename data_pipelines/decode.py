"""Undecoded bytes to uint8 RGB [3, H, W], whatever the file holds: grey, CMYK, palette, alpha, 16 bit, EXIF-turned.

JPEGs go to simplejpeg (libjpeg-turbo without a detour: the fastest of those measured, and it tells when data ran
out); everything else, and what simplejpeg refuses, to PIL. torchvision's PNG decoder is not used: damaged files
crashed the process. Headers are looked at first, so that a decompression bomb is refused before it is decoded.
Whoever needs a large JPEG small may have it decoded at 1/2, 1/4 or 1/8 of its sides (libjpeg's scaled DCT).
"""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import simplejpeg
import torch
from PIL import Image, ImageOps

from lacuna.basics.npy_header import alone, layout

MAX_PIXELS = 120_000_000
_ORIENTATION = 0x0112  # the EXIF tag
Turn = tuple[bool, tuple[int, ...]]  # swap rows and columns?, then flip these dimensions of [3, H, W]
# By EXIF's orientation.
_TURNS: dict[int, Turn] = {2: (False, (2,)), 3: (False, (1, 2)), 4: (False, (1,)),
          5: (True, ()), 6: (True, (2,)), 7: (True, (1, 2)), 8: (True, (1,))}
_SOI, _EOI, _APP1, _SOS = b"\xff\xd8", b"\xff\xd9", 0xE1, 0xDA


class DecodeError(Exception):
    """One sample's bytes are not a usable image or vector; the sample is counted as bad, training goes on."""


class FullSize(NamedTuple):
    """Of an image that may have been decoded smaller."""

    rows: int
    columns: int
    factor: int = 1  # a decoded pixel stands for factor × factor of them


def decode_image(data: bytes) -> torch.Tensor:
    """uint8 [3, H, W], in whatever memory order the decoder has; raises DecodeError with the reason."""
    return decode_scaled(data, None)[0]


def decode_scaled(data: bytes, shrink: Callable[[int, int], float] | None) -> tuple[torch.Tensor, FullSize]:
    """The image, where it is a JPEG at 1/2, 1/4 or 1/8 of its sides if `shrink(rows, columns)` is as large as 2, 4 or
    8, and its size in full. Both as seen: turned as EXIF says."""
    kind = _sniff(data)
    try:
        height, width, colours = _header(data, kind)
    except Exception as error:
        raise DecodeError(f"unreadable image header ({error})") from None
    _refuse_bomb(height, width)
    if colours in ("YCbCr", "Gray", "RGB"):
        # A JPEG with recoverable damage, such as stray bytes between markers, is left to PIL: it uses those, but
        # refuses truncated ones, whose missing part libjpeg would fill with grey.
        with contextlib.suppress(ValueError):
            return _decode_jpeg(data, (height, width), shrink)
    image = _decode_pil(data)
    return image, FullSize(image.shape[-2], image.shape[-1])


def _refuse_bomb(height: int, width: int) -> None:
    if height * width > MAX_PIXELS:
        raise DecodeError(f"image header says {width}x{height}, more than the {MAX_PIXELS:,} pixels allowed")


def _decode_jpeg(data: bytes, stored: tuple[int, int],
                 shrink: Callable[[int, int], float] | None) -> tuple[torch.Tensor, FullSize]:
    turn = turn_of(data)
    seen = (stored[1], stored[0]) if turn[0] else stored
    allowed = 1.0 if shrink is None else shrink(*seen)
    factor = 8 if allowed >= 8 else 4 if allowed >= 4 else 2 if allowed >= 2 else 1  # the ones that are fast
    least = {} if factor == 1 else {"min_height": -(-stored[0] // factor), "min_width": -(-stored[1] // factor)}
    image = torch.from_numpy(simplejpeg.decode_jpeg(data, **least).transpose(2, 0, 1))
    return turned(image, turn), FullSize(*seen, factor)


def is_plain_jpeg(data: bytes) -> bool:
    """Whether these bytes are a whole JPEG, grey or YCbCr, of a size that is allowed: what any decoder can read."""
    if data[:2] != _SOI or not data.rstrip(b"\0").endswith(_EOI):
        return False
    try:
        height, width, colours = _header(data, "jpeg")
    except ValueError:
        return False
    return colours in ("YCbCr", "Gray") and height * width <= MAX_PIXELS


def turned(image: torch.Tensor, turn: Turn) -> torch.Tensor:
    """[3, H, W] as they are stored → as they are seen."""
    swapped, flips = turn
    image = image.mT if swapped else image
    return image.flip(flips) if flips else image


def turn_of(data: bytes) -> Turn:
    """What a JPEG's EXIF data say."""
    exif = _exif_segment(data)
    return _TURNS.get(1 if exif is None else _orientation(exif), (False, ()))


def _exif_segment(data: bytes) -> bytes | None:
    """The APP1 segment with EXIF data, searched in the segments before the picture itself."""
    position = len(_SOI)
    while position + 4 <= len(data) and data[position] == 0xFF and data[position + 1] != _SOS:
        size = int.from_bytes(data[position + 2 : position + 4])
        if data[position + 1] == _APP1 and data.startswith(b"Exif\0\0", position + 4):
            return data[position + 4 : position + 2 + size]
        position += 2 + size
    return None


def _orientation(segment: bytes) -> int:
    exif = Image.Exif()
    try:
        exif.load(segment)
        return int(exif.get(_ORIENTATION, 1))
    except Exception:  # broken EXIF data; viewers show such images as they are
        return 1


def _decode_pil(data: bytes) -> torch.Tensor:
    try:
        with Image.open(io.BytesIO(data)) as opened:
            _refuse_bomb(opened.height, opened.width)  # a file may show one size first and have another
            picture = ImageOps.exif_transpose(opened)
            if picture.mode.startswith("I"):
                # convert("RGB") would clip 16-bit greys at 255 instead of scaling them.
                picture = Image.fromarray((np.asarray(picture) >> 8).astype(np.uint8))
            array = np.array(picture.convert("RGB"))
    except DecodeError:
        raise
    except Exception as error:  # PIL raises a different kind for every way a file can be broken
        raise DecodeError(f"{type(error).__name__}: {error}") from None
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def _sniff(data: bytes) -> str:
    if data[:2] == _SOI:
        return "jpeg"
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "png"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "webp"
    raise DecodeError(f"not a JPEG, PNG or WebP (starts with {data[:8].hex() or 'nothing'})")


def _header(data: bytes, kind: str) -> tuple[int, int, str]:
    """(height, width, colour space of a JPEG)"""
    if kind == "jpeg":
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data, strict=False)
        return height, width, colours
    if kind == "png":
        width, height = struct.unpack(">II", data[16:24])
        return height, width, ""
    with Image.open(io.BytesIO(data)) as picture:
        return picture.height, picture.width, ""


def decode_vector(data: bytes) -> np.ndarray:
    """A `.npy` member: one float vector. Never unpickles."""
    try:
        known = layout(data)
        vector = (np.frombuffer(data, known.dtype, offset=known.start).reshape(known.shape) if known is not None
                  else alone(lambda: np.load(io.BytesIO(data), allow_pickle=False)))
    except Exception as error:
        raise DecodeError(f"not a plain .npy array ({error})") from None
    if vector.ndim != 1 or vector.dtype.kind != "f" or not np.isfinite(vector).all():
        raise DecodeError(f"expected one finite float vector, found {vector.dtype} {vector.shape}")
    return vector.astype(np.float32)
