"""Proves that every kind of image becomes upright 8-bit RGB as PIL sees it, and that unusable bytes say why."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from lacuna.data_pipelines.decode import MAX_PIXELS, DecodeError, decode_image, decode_vector

HEIGHT, WIDTH = 48, 72


def picture(seed: int = 0) -> Image.Image:
    """A smooth RGB image with nothing symmetric about it."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def by_pil(data: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(data)) as opened:
        return np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))


def check(data: bytes, expected: np.ndarray, tolerance: int = 0) -> None:
    image = decode_image(data)
    assert image.dtype == torch.uint8
    assert image.shape == (3, *expected.shape[:2])
    difference = image.permute(1, 2, 0).numpy().astype(int) - expected
    assert np.abs(difference).max() <= tolerance


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"subsampling": 0}, {"quality": 30}])
def test_jpeg(options):
    data = encoded(picture(), "JPEG", **options)
    check(data, by_pil(data), tolerance=2)


def test_grey_and_cmyk_jpeg():
    for mode in ("L", "CMYK"):
        data = encoded(picture().convert(mode), "JPEG", quality=95)
        check(data, by_pil(data), tolerance=2)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_a_jpeg(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture(), "JPEG", exif=exif, quality=95)
    expected = by_pil(data)
    assert expected.shape[:2] == ((WIDTH, HEIGHT) if orientation >= 5 else (HEIGHT, WIDTH))
    check(data, expected, tolerance=2)


def test_exif_after_other_segments_is_found_and_broken_exif_is_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, turned = encoded(picture(), "JPEG"), encoded(picture(), "JPEG", exif=exif)
    comment = b"\xff\xfe" + struct.pack(">H", 60_002) + bytes(60_000)
    assert decode_image(turned[:2] + comment + turned[2:]).shape == (3, WIDTH, HEIGHT)
    broken = b"\xff\xe1" + struct.pack(">H", 20) + b"Exif\0\0" + b"\xff" * 12
    assert decode_image(plain[:2] + broken + plain[2:]).shape == (3, HEIGHT, WIDTH)


def test_png_with_palette_or_alpha():
    for mode in ("P", "L", "1"):
        data = encoded(picture().convert(mode), "PNG")
        check(data, by_pil(data))
    see_through = picture()
    see_through.putalpha(Image.fromarray(np.linspace(0, 255, HEIGHT * WIDTH).astype(np.uint8).reshape(HEIGHT, WIDTH)))
    check(encoded(see_through, "PNG"), np.asarray(picture()))
    check(encoded(picture().convert("LA"), "PNG"), np.asarray(picture().convert("L").convert("RGB")))


def test_16_bit_png_is_scaled_not_clipped():
    deep = np.linspace(0, 65535, HEIGHT * WIDTH).astype(np.uint16).reshape(HEIGHT, WIDTH)
    check(encoded(Image.fromarray(deep), "PNG"), np.repeat((deep >> 8)[..., None], 3, axis=2).astype(int), tolerance=1)
    colour = np.stack([deep, deep[::-1], deep.T.reshape(HEIGHT, WIDTH)], axis=2)
    check(png_rgb16(colour), (colour >> 8).astype(int), tolerance=1)


def test_webp():
    data = encoded(picture(), "WEBP", lossless=True)
    check(data, np.asarray(picture()))


def test_jpeg_with_harmless_damage_is_used():
    data = encoded(picture(), "JPEG")
    check(data + b"\0" * 5000, by_pil(data), tolerance=2)  # padding after the end
    scan = data.index(b"\xff\xda")
    check(data[:scan] + b"\0\0\0" + data[scan:], by_pil(data), tolerance=2)  # stray bytes before a marker


JPEG = encoded(picture(), "JPEG", quality=95)
PNG = encoded(picture(), "PNG")


@pytest.mark.parametrize(("data", "reason"), [
    (b"", "starts with nothing"),
    (b"GIF89a" + bytes(100), "not a JPEG, PNG or WebP"),
    (bytes(range(256)), "not a JPEG, PNG or WebP"),
    (JPEG[: len(JPEG) // 2], "truncated"),
    (JPEG[:-40], "truncated"),
    (JPEG[:30], "header"),
    (JPEG[:2], "header"),
    (JPEG[:2] + bytes(500), "header"),
    (PNG[: len(PNG) // 2], "runcated"),
    (PNG[:20], "header"),
    (PNG[:60] + bytes(200), "Error"),
    (encoded(picture(), "WEBP")[:60], "header|Error"),
])
def test_unusable_bytes_are_refused_with_a_reason(data, reason):
    with pytest.raises(DecodeError, match=reason):
        decode_image(data)


def test_decompression_bomb_is_refused_by_its_header():
    """The files hold no pixels: only a refusal before decoding can name the size."""
    side = 30_000
    assert side**2 > MAX_PIXELS
    png = PNG[:16] + struct.pack(">II", side, side) + PNG[24:]
    frame = JPEG.index(b"\xff\xc0")
    jpeg = JPEG[: frame + 5] + struct.pack(">HH", side, side) + JPEG[frame + 9 :]
    webp = b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + (
        struct.pack("<I", 16_383)[:3] * 2)
    for data in (png, jpeg):
        with pytest.raises(DecodeError, match=f"{side}x{side}, more than the {MAX_PIXELS:,}"):
            decode_image(data)
    with pytest.raises(DecodeError):
        decode_image(webp)


def test_random_damage_never_raises_anything_else():
    rng = np.random.default_rng(0)
    for source in (JPEG, PNG, encoded(picture(), "WEBP"), encoded(picture().convert("CMYK"), "JPEG")):
        for _ in range(60):
            damaged = bytearray(source)
            for place in rng.integers(2, len(damaged), 4):
                damaged[place] = rng.integers(256)
            try:
                image = decode_image(bytes(damaged))
            except DecodeError:
                continue
            assert image.shape[0] == 3
            assert image.dtype == torch.uint8


def test_vectors():
    def saved(array) -> bytes:
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=True)
        return buffer.getvalue()

    assert np.array_equal(decode_vector(saved(np.arange(5, dtype=np.float16))), np.arange(5, dtype=np.float32))
    for bad in (np.zeros((2, 2)), np.array([1, 2]), np.array([np.nan]), np.array([{}], dtype=object)):
        with pytest.raises(DecodeError):
            decode_vector(saved(bad))
    with pytest.raises(DecodeError, match="not a plain"):
        decode_vector(b"\x93NUMPY garbage")


def png_rgb16(pixels: np.ndarray) -> bytes:
    """A 16-bit RGB PNG, which PIL does not write."""
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    rows, columns, _ = pixels.shape
    lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 16, 2, 0, 0, 0))
            + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b""))
