"""Stored numbers to values and back on the training device, with the host's rounding (state_store/rounding.py), bit for
bit: a quantised field then travels as one byte per entry instead of four. Legend: B rows, C columns."""

from __future__ import annotations

import numpy as np
import torch

from lacuna.state_store.fields import Field
from lacuna.trainer.on_device.hashing import random_bits
from lacuna.trainer.on_device.uploads import beside

_HALF_MAX, _HALF_TINY = 65504.0, 2.0**-14


def upload(field: Field, stored: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Stored numbers (as `host_buffer` holds them) there, as uint8 or signed integers that hold them, or as floats."""
    found = beside(stored, device)
    return found.to(torch.int32) & 0xFFFF if field.stored_dtype == np.uint16 else found


def decode(field: Field, codes: torch.Tensor) -> torch.Tensor:
    """As Field.decode: float32, bool (bits), or the numbers themselves."""
    if field.dtype == "bits":
        places = torch.arange(7, -1, -1, device=codes.device, dtype=torch.uint8)
        return ((codes[..., None] >> places) & 1).flatten(1)[:, : field.shape[0]].bool()
    if field.range is not None:
        low, high = field.range
        values = codes.to(torch.float32) * float(np.float32((high - low) / np.iinfo(field.stored_dtype).max))
        return values + float(np.float32(low)) if low else values
    return codes.float() if field.dtype == "float16" else codes


def encode(field: Field, values: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
    """As Field.encode, as bytes that the stored type reads; `keys` (hashing.upper) where rounding is stochastic."""
    if field.dtype == "bits":
        spare = -field.shape[0] % 8
        bits = torch.nn.functional.pad(values.to(torch.uint8), (0, spare)).view(len(values), -1, 8)
        weights = 2 ** torch.arange(7, -1, -1, device=values.device, dtype=torch.uint8)
        return (bits * weights).sum(2, dtype=torch.uint8)
    if field.range is None and not field.stochastic:
        return values.to(getattr(torch, field.dtype))
    flat = values if values.ndim == 2 else values.reshape(len(values), field.columns)
    if field.range is not None:
        found = _to_codes(field, flat, keys)
    else:
        assert keys is not None
        found = _to_half(flat, keys)
    return found if values.ndim == 2 else found.reshape(values.shape)


def _to_codes(field: Field, values: torch.Tensor, keys: torch.Tensor | None) -> torch.Tensor:
    assert field.range is not None
    low, high = field.range
    top, fraction = int(np.iinfo(field.stored_dtype).max), 24 - 8 * field.stored_dtype.itemsize
    scaled = values.to(torch.float32) * float(np.float32(top / (high - low) * 2**fraction))
    if low:
        scaled = scaled + float(np.float32(-low * top / (high - low) * 2**fraction))
    fixed = scaled.clamp(0, float(top << fraction)).to(torch.int32)
    if keys is None:
        fixed = fixed + (1 << (fraction - 1))
    else:
        fixed = fixed + (random_bits(keys, values.shape[1]) >> (32 - fraction)).to(torch.int32)
    return (fixed >> fraction).to(torch.uint8 if field.stored_dtype.itemsize == 1 else torch.int16)


def _to_half(values: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    real = values.to(torch.float32).clamp(-_HALF_MAX, _HALF_MAX).contiguous()
    noise = random_bits(keys, values.shape[1])
    pattern = real.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    body = (pattern & 0x7FFFFFFF) + (noise >> 19) - (112 << 23)
    half = (body >> 13).clamp(0, 0x7BFF) | ((pattern >> 16) & 0x8000)
    part = (noise >> 8).to(torch.float32) * 2.0**-24
    subnormal = torch.floor(real * 2.0**24 + part) * 2.0**-24
    return torch.where(real.abs() < _HALF_TINY, subnormal.to(torch.float16), half.to(torch.int16).view(torch.float16))
