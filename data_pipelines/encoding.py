"""Image bytes that packing changes on request: a smaller JPEG, or the same JPEG with another orientation tag."""

from __future__ import annotations

import io
import struct

import numpy as np
from PIL import Image, ImageOps

from lacuna.basics.errors import UserError

JPEG_QUALITY = 92
# EXIF orientation values that turn the stored picture counter-clockwise by so many degrees.
_ORIENTATIONS = {90: 8, 180: 3, 270: 6}
_EXIF = b"Exif\x00\x00"


def shrink_to_jpeg(data: bytes, short_edge: int, where: str) -> bytes:
    """An RGB JPEG whose shorter edge is at most `short_edge`, upright (its EXIF orientation is applied)."""
    try:
        with Image.open(io.BytesIO(data)) as opened:
            # JPEG can decode at 1/2, 1/4 or 1/8 for free; twice the target keeps the later resize sharp.
            opened.draft("RGB", (2 * short_edge, 2 * short_edge))
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I;16"):
                # convert("RGB") would clip 16-bit greys at 255 instead of scaling them.
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            image = image.convert("RGB")
    except Exception as error:  # Pillow raises many kinds for damaged files
        raise UserError(f"{where}: cannot be decoded for --resize ({type(error).__name__}: {error}). "
                        "Repair or remove the file.") from None
    scale = short_edge / min(image.size)
    if scale < 1:
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image = image.resize(size, Image.Resampling.BICUBIC)
    out = io.BytesIO()
    image.save(out, "JPEG", quality=JPEG_QUALITY)
    return out.getvalue()


def with_rotation(jpeg: bytes, degrees: int) -> bytes:
    """The same JPEG, marked to be shown turned counter-clockwise; pixels are not touched, nothing is lost."""
    if degrees % 360 == 0 or jpeg[:2] != b"\xff\xd8":
        return jpeg
    tiff = struct.pack(">2sHIHHHIHHI", b"MM", 42, 8, 1, 0x0112, 3, 1, _ORIENTATIONS[degrees % 360], 0, 0)
    segment = b"\xff\xe1" + struct.pack(">H", 2 + len(_EXIF) + len(tiff)) + _EXIF + tiff
    return b"\xff\xd8" + segment + _without_exif(jpeg)


def _without_exif(jpeg: bytes) -> bytes:
    """What follows the start marker, without EXIF segments (two of them would contradict each other)."""
    kept, at = [], 2
    while at + 4 <= len(jpeg) and jpeg[at] == 0xFF and jpeg[at + 1] not in (0xDA, 0xD9, 0xFF):
        end = at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
        if not (jpeg[at + 1] == 0xE1 and jpeg[at + 4 : at + 10] == _EXIF):
            kept.append(jpeg[at:end])
        at = end
    return b"".join(kept) + jpeg[at:]
