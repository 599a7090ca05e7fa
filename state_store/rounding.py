"""Floats to stored numbers: nearest or stochastic rounding to uint8/uint16 over a range, and to float16.

Stochastic rounding is unbiased, so a running average with a small step does not stall (nearest rounding to uint8 left
decaying scores 4× too high). Work is done in blocks that stay in the CPU's cache. Legend: B rows, C columns.
"""

from __future__ import annotations

import numpy as np

from lacuna.state_store.row_hash import random_bits

_BLOCK = 1 << 16  # entries: three such blocks fit a core's L2 cache; smaller ones measured slower (call overhead)
_HALF_MAX = np.float32(65504)
_HALF_TINY = np.float32(2**-14)  # below it float16 is subnormal: its spacing no longer shrinks


def to_codes(values: np.ndarray, low: float, high: float, dtype: np.dtype, keys: np.ndarray | None) -> np.ndarray:
    """[B, C] floats → codes 0..max of the range [low, high]; outside values are clipped. `keys` uint64 [B]: stochastic.

    Fixed point: a code with its fraction is a 24-bit integer (what a float32 holds exactly), noise is added below the
    point, and a shift truncates. Nearest rounding is the same with noise of one half.
    """
    top = np.iinfo(dtype).max
    fraction = 24 - 8 * np.dtype(dtype).itemsize
    scale = np.float32(top / (high - low) * 2**fraction)
    shift = np.float32(-low * top / (high - low) * 2**fraction)
    out = np.empty(values.shape, dtype)
    step = max(1, _BLOCK // max(1, values.shape[1]))
    for start in range(0, len(values), step):
        block = slice(start, start + step)
        scaled = np.multiply(values[block], scale, dtype=np.float32)
        if low:
            scaled += shift
        np.clip(scaled, 0, np.float32(top << fraction), out=scaled)
        fixed = scaled.astype(np.int32)
        if keys is None:
            fixed += np.int32(1 << (fraction - 1))
        else:
            noise = random_bits(keys[block], values.shape[1])
            noise >>= np.uint32(32 - fraction)
            fixed += noise.view(np.int32)
        fixed >>= np.int32(fraction)
        np.copyto(out[block], fixed, casting="unsafe")
    return out


def from_codes(codes: np.ndarray, low: float, high: float) -> np.ndarray:
    out = np.multiply(codes, np.float32((high - low) / np.iinfo(codes.dtype).max), dtype=np.float32)
    if low:
        out += np.float32(low)
    return out


def to_half(values: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """[B, C] float32 → float16 with stochastic rounding: random bits are added below float16's last place.

    The float16 pattern is made with integer operations: numpy's own conversion is 3× slower here.
    """
    out = np.empty(values.shape, np.float16)
    step = max(1, _BLOCK // max(1, values.shape[1]))
    for start in range(0, len(values), step):
        block = slice(start, start + step)
        real = np.clip(values[block], -_HALF_MAX, _HALF_MAX, dtype=np.float32)
        noise = random_bits(keys[block], values.shape[1])
        pattern = real.view(np.uint32)
        tiny = np.abs(real) < _HALF_TINY
        some_tiny = bool(tiny.any())
        if some_tiny:
            part = (noise[tiny] >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)
            subnormal = np.floor(real[tiny] * np.float32(2**24) + part) * np.float32(2**-24)
        sign = pattern >> np.uint32(16)
        sign &= np.uint32(0x8000)
        pattern &= np.uint32(0x7FFFFFFF)
        noise >>= np.uint32(19)  # 13 random bits: a float32 has 13 more mantissa bits than a float16
        pattern += noise
        pattern -= np.uint32(112 << 23)  # from float32's exponent bias to float16's
        pattern >>= np.uint32(13)
        np.minimum(pattern, np.uint32(0x7BFF), out=pattern)  # 65504 must not be rounded up to infinity
        pattern |= sign
        np.copyto(out[block].view(np.uint16), pattern, casting="unsafe")
        if some_tiny:
            out[block][tiny] = subnormal
    return out
