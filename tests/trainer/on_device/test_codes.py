"""Encoding, decoding, hashing and selecting with PyTorch equals the store's numpy, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lacuna.basics.hashing import mix, uniform_array
from lacuna.state_store import Field
from lacuna.state_store.cutoffs import Cutoffs
from lacuna.state_store.row_hash import random_bits
from lacuna.trainer.on_device import codes, hashing
from lacuna.trainer.on_device.uploads import host_buffer

CPU = torch.device("cpu")
FIELDS = [
    Field("a", (37,), "uint8", range=(0.0, 1.0), stochastic=True), Field("b", (37,), "uint8", range=(-3.0, 2.0)),
    Field("c", (37,), "uint16", range=(-17.0, 17.0), stochastic=True), Field("d", (37,), "uint16", range=(0.0, 1.0)),
    Field("e", (37,), "float16", stochastic=True), Field("f", (37,), "float16"), Field("g", (37,), "float32"),
    Field("h", (37,), "bits"), Field("i", (4, 3, 3), "uint8", range=(0.0, 1.0), stochastic=True),
    Field("j", (37,), "int32"), Field("k", (5,), "int16"), Field("l", (8,), "bits"),
]


def held(stored: np.ndarray) -> torch.Tensor:
    tensor, array = host_buffer(stored.shape, stored.dtype, CPU)
    array[...] = stored
    return tensor


def values_of(field: Field, rng: np.random.Generator) -> np.ndarray:
    shape = (64, *field.shape)
    if field.dtype == "bits":
        return rng.random(shape) < 0.3
    if field.dtype.startswith("int"):
        return rng.integers(-1, 1000, shape)
    low, high = field.range or (-1.0, 1.0)
    values = (low + (high - low) * rng.random(shape)).astype(np.float32)
    values.flat[:6] = low, high, low - 1, high + 1, 0.0, -0.0
    if field.range is None:  # the whole range of halves: subnormal, huge, and both signs
        values *= (10.0 ** rng.uniform(-9, 5 if field.stochastic else 4, shape)).astype(np.float32)
    return values


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: f"{field.dtype}-{field.name}")
def test_codes(field):
    rng = np.random.default_rng(0)
    for epoch in range(20):
        values = values_of(field, rng)
        keys = field.rounding_keys(7, epoch, rng.integers(0, 2**20, 64), rng.integers(0, 2**30, 64))
        expected = field.encode(values, keys if field.stochastic else None)
        found = codes.encode(field, torch.from_numpy(values), hashing.upper(keys, CPU) if field.stochastic else None)
        np.testing.assert_array_equal(found.numpy().view(field.stored_dtype).view(np.uint8), expected.view(np.uint8))
        decoded = codes.decode(field, codes.upload(field, held(expected), CPU)).numpy()
        host = field.decode(expected)
        assert decoded.dtype == host.dtype
        np.testing.assert_array_equal(decoded.view(np.uint8), np.ascontiguousarray(host).view(np.uint8))


def test_hashes():
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 2**64, 50, dtype=np.uint64)
    np.testing.assert_array_equal(hashing.random_bits(hashing.upper(keys, CPU), 1000).numpy(), random_bits(keys, 1000))
    numbers = rng.integers(0, 2**62, 1000)
    for part in range(20):
        seed = mix(3, part)
        found = hashing.uniform(torch.tensor(hashing.signed(seed)), torch.from_numpy(numbers))
        np.testing.assert_array_equal(found.numpy(), uniform_array(seed, numbers))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_selected(dtype):
    """Few different codes, hence many ties; columns of which all, none or some ties are chosen."""
    rng = np.random.default_rng(2)
    shards, rows = rng.integers(0, 99, 400), rng.integers(0, 1000, 400)
    stored = rng.integers(250, 256, (400, 60)).astype(dtype)
    bounds = rng.integers(0, 2**64, 60, dtype=np.uint64)
    bounds[:9] = 2**64 - 1
    cutoffs = Cutoffs(np.where(np.arange(60) % 7 == 0, 1 << 32, rng.integers(249, 257, 60)), bounds, 2**64 - 59, 1000)
    field = Field("score", (60,), np.dtype(dtype).name, range=(0.0, 1.0))
    found = hashing.selected(cutoffs, codes.upload(field, held(stored), CPU), shards, rows).numpy()
    expected = cutoffs.selected(stored, shards, rows)
    np.testing.assert_array_equal(found, expected)
    assert 0.2 < expected.mean() < 0.8


def test_draws_are_finite_at_both_ends():
    ends = hashing.quantile(torch.tensor([0, 2**32 - 1, 2**31]))
    assert torch.isfinite(ends).all()
    assert ends[0] == -ends[1] < -5 < ends[2] < 1e-6
