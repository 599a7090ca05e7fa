"""The stateless hashes of basics/hashing.py and state_store/row_hash.py on the training device, bit for bit.

PyTorch has no unsigned arithmetic on every device: a uint64 is an int64 with the same bits (products wrap alike), a
uint32 an int64 from 0 to 2³² − 1. Legend: B rows, C columns.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from lacuna.basics import hashing
from lacuna.state_store import row_hash
from lacuna.state_store.cutoffs import Cutoffs
from lacuna.trainer.on_device.uploads import to_device

_LOW = 0xFFFFFFFF
_SIGN = -(1 << 63)
_STEP = np.uint64(0x9E3779B97F4A7C15)


def signed(number: int) -> int:
    """The int64 with the bits of a uint64."""
    return number - (1 << 64) if number >> 63 else number


_GOLDEN, _A, _B = (signed(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mix64(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shifted(z, 30)) * _A
    z = (z ^ _shifted(z, 27)) * _B
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    """To the right, zeros from the left."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seeds: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """float64 in [0, 1): `hashing.uniform_array` with a seed (int64) for every value."""
    return _shifted(mix64((values ^ seeds) + _GOLDEN), 11).double() * 2.0**-53


def random_bits(keys: torch.Tensor, columns: int) -> torch.Tensor:
    """uint32 [B, C] from the upper halves of row keys [B, 1] (`upper`)."""
    h = keys ^ _column_keys(columns, keys.device)
    h = (h * 0x7FEB352D) & _LOW
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _LOW
    return h


def normal(keys: torch.Tensor, columns: int) -> torch.Tensor:
    """float32 [B, C] of N(0, 1), from the upper halves of row keys [B, 1] (`upper`)."""
    return quantile(random_bits(keys, columns))


def quantile(bits: torch.Tensor) -> torch.Tensor:
    """Of N(0, 1), from uint32. With more than 23 bits of it float32 would round the last ones up to 1: to infinity."""
    return torch.special.ndtri(((bits >> 9).float() + 0.5) * 2.0**-23)


def upper(keys: np.ndarray, device: torch.device) -> torch.Tensor:
    """int64 [B, 1]"""
    return to_device((keys >> np.uint64(32)).astype(np.int64)[:, None], device)


@functools.lru_cache(maxsize=64)
def _column_keys(columns: int, device: torch.device) -> torch.Tensor:
    return to_device(row_hash._column_keys(columns).astype(np.int64), device)


def selected(cutoffs: Cutoffs, codes: torch.Tensor, shards: np.ndarray, rows: np.ndarray) -> torch.Tensor:
    """bool [B, L]: `Cutoffs.selected`, without looking for ties first."""
    samples = (np.asarray(shards).astype(np.int64) * cutoffs.max_rows + np.asarray(rows)).astype(np.uint64) * _STEP
    theta, bounds, columns = _of_columns(cutoffs, codes.device)
    keys = mix64(to_device(samples.view(np.int64)[:, None], codes.device) + columns)
    return (codes > theta) | ((codes == theta) & ((keys ^ _SIGN) <= bounds))


@functools.lru_cache(maxsize=4)
def _of_columns(cutoffs: Cutoffs, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """int64 [L]: codes, bounds (in the order of signed numbers) and hashes of the columns; they go up once an epoch."""
    columns = hashing.mix64(np.arange(len(cutoffs.codes), dtype=np.uint64) * _STEP + np.uint64(cutoffs.tie_key))
    bounds = cutoffs.bounds.view(np.int64) ^ np.int64(_SIGN)
    return to_device(cutoffs.codes, device), to_device(bounds, device), to_device(columns.view(np.int64), device)
