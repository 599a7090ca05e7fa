"""Proves that rounding is unbiased, reproducible and as fine as the stored type allows, and that hashes are sound."""

from __future__ import annotations

import numpy as np
import pytest

from lacuna.basics.errors import UserError
from lacuna.state_store import Constant, Draw, Field, Given
from lacuna.state_store.row_hash import mix64, random_bits, row_keys, tag_key, tie_keys, uniform


def keys(count: int, epoch: int = 0, seed: int = 1) -> np.ndarray:
    return row_keys(tag_key(seed, "t", epoch), np.arange(count) // 100, np.arange(count) % 100)


def test_bits_are_uniform_and_uncorrelated():
    """Means, variances and all pairwise correlations of rows and columns are those of independent uniforms."""
    u = (random_bits(keys(512), 400) >> np.uint32(8)) / 2**24
    assert abs(u.mean() - 0.5) < 4 / np.sqrt(12 * u.size)
    assert np.abs(np.histogram(u, 64, (0, 1))[0] / u.size * 64 - 1).max() < 0.1
    for table in (u, u.T):
        n = table.shape[1]
        off_diagonal = np.corrcoef(table)[np.triu_indices(len(table), 1)]
        assert np.abs(off_diagonal).max() < 6 / np.sqrt(n)
        assert abs(off_diagonal.mean()) < 6 / np.sqrt(n * len(off_diagonal))


def test_bits_depend_on_every_coordinate():
    """Seed, tag, epoch, shard, row and column each change the number."""
    def draw(seed=1, tag="a", epoch=0, shard=0, row=0, column=0):
        return int(random_bits(row_keys(tag_key(seed, tag, epoch), np.array([shard]), np.array([row])), 8)[0, column])

    others = [draw(seed=2), draw(tag="b"), draw(epoch=1), draw(shard=1), draw(row=1), draw(column=1)]
    assert draw() == draw()
    assert len({draw(), *others}) == 7


def test_tie_keys_are_distinct_within_a_column():
    """No two samples of one column share a tie key, because the hash is a bijection."""
    found = tie_keys(tag_key(3, "ties"), np.arange(200_000), np.full(200_000, 17))
    assert len(np.unique(found)) == 200_000
    assert len(np.unique(mix64(np.arange(100_000)))) == 100_000


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_codes_nearest_equals_the_formula(dtype):
    """Nearest rounding is round((x − low) / step), clipped to the range."""
    field = Field("x", (50,), dtype, range=(-2, 3))
    values = np.random.default_rng(0).uniform(-3, 4, (40, 50)).astype(np.float32)
    top = np.iinfo(dtype).max
    expected = (np.clip(values, -2, 3).astype(np.float64) + 2) / 5 * top
    assert np.abs(field.encode(values) - expected).max() <= 0.5 + 1e-2
    assert field.encode(np.array([[-2.0, 3.0] * 25], np.float32)).tolist() == [[0, top] * 25]
    np.testing.assert_array_equal(field.encode(field.decode(field.encode(values))), field.encode(values))


@pytest.mark.parametrize("field", [
    Field("x", (1000,), "uint8", range=(0, 1), stochastic=True),
    Field("x", (1000,), "uint16", range=(-1, 1), stochastic=True),
    Field("x", (1000,), "float16", stochastic=True),
], ids=lambda f: f.dtype)
def test_stochastic_rounding_is_unbiased(field):
    """The mean over rows is the value itself, each result is one of the two neighbours, and edges stay put."""
    for value in (0.0, 1.0, 0.30001, 0.0019, 7e-6, 0.7499):
        values = np.full((400, 1000), value, np.float32)
        got = field.decode(field.encode(values, keys(400))).astype(np.float64)
        steps = {"uint8": 1 / 255, "uint16": 2 / 65535, "float16": float(np.spacing(np.float16(value)))}
        step = steps[field.dtype]
        assert np.abs(got - value).max() <= step * 1.001
        assert abs(got.mean() - value) < 6 * step / np.sqrt(12 * got.size) + step * 2e-3


def test_half_rounding_keeps_exact_values():
    """What float16 holds exactly is not moved: signs, subnormals, the largest number; beyond it is clipped."""
    exact = np.array([[0.0, -0.0, 1.0, -1.5, 65504.0, -65504.0, 2.0**-24, -(2.0**-15), 6.1035e-05]], np.float32)
    exact = exact.astype(np.float16).astype(np.float32)
    field = Field("x", (9,), "float16", stochastic=True)
    for epoch in range(50):
        np.testing.assert_array_equal(field.encode(exact, keys(1, epoch)).astype(np.float32), exact)
    assert field.encode(np.full((1, 9), 1e9, np.float32), keys(1)).max() == np.float16(65504)


def test_running_average_does_not_stall():
    """A uint8 average of falling scores follows the float32 one when rounded stochastically; nearest sticks above."""
    n, steps, target = 50, 40, np.float32(0.0019)
    exact, averages = np.float32(0.5), {}
    for stochastic in (True, False):
        field = Field("ema", (1000,), "uint8", range=(0, 1), stochastic=stochastic)
        codes = field.encode(np.full((n, 1000), 0.5, np.float32))
        exact = np.float32(0.5)
        for step in range(steps):
            codes = field.encode(0.8 * field.decode(codes) + 0.2 * target, keys(n, step))
            exact = np.float32(0.8) * exact + np.float32(0.2) * target
        averages[stochastic] = float(field.decode(codes).mean())
    assert abs(averages[True] - exact) < 0.05 * exact
    assert averages[False] > 3 * exact


def test_small_half_steps_arrive():
    """A float16 logit near −3 moved by 1e-4 a visit (a twentieth of its spacing) travels the whole way on average."""
    field = Field("phi", (2000,), "float16", stochastic=True)
    stored = np.full((20, 2000), -3, np.float16)
    for step in range(100):
        stored = field.encode(field.decode(stored) + np.float32(1e-4), keys(20, step))
    assert abs(field.decode(stored).mean() - (-3 + 0.01)) < 3e-4


def test_draws_are_stable_and_in_range():
    """Seeded initial values depend on (seed, field, shard, row) only and fill their range."""
    field = Field("phi", (100,), "float32", Draw(-0.5, 0.25))
    rows = field.initial_rows(7, 3, 200)
    np.testing.assert_array_equal(rows[:50], field.initial_rows(7, 3, 50))
    assert rows.min() >= -0.5
    assert rows.max() < 0.25
    assert abs(rows.mean() + 0.125) < 0.01
    assert (rows != field.initial_rows(7, 4, 200)).any()
    np.testing.assert_array_equal(uniform(1, "a", 2, np.array([5, 6]), 3)[1], uniform(1, "a", 2, np.array([6]), 3)[0])


def test_bits_pack_eight_to_a_byte():
    """Booleans of any width survive packing."""
    field = Field("seen", (13,), "bits", Constant(1))
    values = np.random.default_rng(0).random((30, 13)) < 0.5
    stored = field.encode(values)
    assert stored.shape == (30, 2)
    np.testing.assert_array_equal(field.decode(stored), values)
    assert field.decode(field.initial_rows(0, 0, 4)).all()


@pytest.mark.parametrize(("arguments", "message"), [
    ({"name": "Bad Name"}, "lower-case"),
    ({"dtype": "float64"}, r"dtype 'float64'.*float32"),
    ({"range": (0, 1)}, r"needs dtype uint8 or uint16"),
    ({"dtype": "uint8", "range": (1, 1)}, r"low < high"),
    ({"stochastic": True}, "float16"),
    ({"histogram": True}, "one-dimensional quantised"),
    ({"dtype": "bits", "shape": (2, 2)}, "one dimension"),
    ({"shape": (0,)}, "≥ 1"),
    ({"compression": "gzip"}, "lz4"),
])
def test_bad_fields_are_refused(arguments, message):
    """A field that cannot work says which of its settings is wrong."""
    with pytest.raises(UserError, match=message):
        Field(**{"name": "x", "shape": (4,), "dtype": "float32", **arguments})


def test_fields_survive_json():
    """Schema text holds all of a field."""
    for field in (Field("a", (3, 2), "uint8", Draw(0, 1), range=(0, 1)), Field("b", (), "int32", Constant(-1)),
                  Field("c", (9,), "float16", Given("labels"), stochastic=True, compression="zstd")):
        assert Field.from_json(field.to_json()) == field


def test_given_rows_of_a_wrong_shape_are_refused():
    """An initial function that returns other rows is named."""
    field = Field("ema", (4,), "uint8", Given(), range=(0, 1))
    with pytest.raises(UserError, match=r"ema.*\(3, 4\).*shard 2.*\(5, 4\)"):
        field.initial_rows(0, 2, 5, lambda shard: np.zeros((3, 4)))
