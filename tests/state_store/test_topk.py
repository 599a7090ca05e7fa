"""Proves that top-k tables track the highest columns of each row as a dict per row would."""

from __future__ import annotations

import numpy as np
import pytest

from lacuna.basics.errors import UserError
from lacuna.state_store.topk import UNTRACKED, dense, lookup, topk_fields, track


def naive_track(row: dict[int, float], offers: list[tuple[int, float]], k: int, forced: set[int]) -> dict[int, float]:
    """One row as {column: value}: update, then keep forced ones and the highest."""
    merged = {**row, **dict(offers)}
    order = sorted(merged, key=lambda c: (c not in forced, -merged[c], c not in row, c))
    return {c: merged[c] for c in order[:k]}


def test_tracking_equals_a_dict_per_row():
    """Twenty rounds of random offers, with forced columns and repeated ones, keep what a dict per row keeps."""
    rng = np.random.default_rng(0)
    rows, k, columns = 30, 4, 12
    ids, values = np.full((rows, k), UNTRACKED, np.int16), np.zeros((rows, k), np.float32)
    model: list[dict[int, float]] = [{} for _ in range(rows)]
    pinned = rng.integers(0, columns, rows)
    for _ in range(20):
        offered = np.stack([rng.permutation(columns)[:5] for _ in range(rows)])
        offered[:, 0] = pinned
        offered[:, 1:][offered[:, 1:] == pinned[:, None]] = UNTRACKED
        scores = rng.integers(0, 6, (rows, 5)).astype(np.float32)
        forced = offered == pinned[:, None]
        ids, values = track(ids, values, offered, scores, forced)
        for row in range(rows):
            offers = [(int(c), float(v)) for c, v in zip(offered[row], scores[row], strict=True) if c != UNTRACKED]
            model[row] = naive_track(model[row], offers, k, {int(pinned[row])})
            got = {int(c): float(v) for c, v in zip(ids[row], values[row], strict=True) if c != UNTRACKED}
            assert got == model[row]


def test_dense_view_and_lookup():
    """Tracked values are in their columns, the rest is the untracked value; heatmaps come along."""
    ids = np.array([[2, UNTRACKED], [0, 4]], np.int16)
    values = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    view = dense(ids, values, 5, untracked=-9)
    expected = np.full((2, 5, 2), -9, np.float32)
    expected[0, 2], expected[1, 0], expected[1, 4] = values[0, 0], values[1, 0], values[1, 1]
    np.testing.assert_array_equal(view, expected)
    np.testing.assert_array_equal(lookup(ids, np.array([[2, 3], [4, 0]])), [[0, UNTRACKED], [1, 0]])


def test_fields_of_a_table():
    """Ids are as narrow as the class list allows, start untracked, and k is checked."""
    ids, values = topk_fields("heat", 10, 1000, "uint8", (14, 14), range=(0, 1))
    assert (ids.dtype, ids.shape, values.shape) == ("int16", (10,), (10, 14, 14))
    assert (ids.initial_rows(0, 0, 2) == UNTRACKED).all()
    assert topk_fields("phi", 5, 40_000, "float16")[0].dtype == "int32"
    with pytest.raises(UserError, match=r"k = 0.*1\.\.10"):
        topk_fields("x", 0, 10, "uint8")
    with pytest.raises(UserError, match="raise k"):
        track(np.full((1, 1), UNTRACKED), np.zeros((1, 1)), np.array([[1, 2]]), np.zeros((1, 2)), np.ones((1, 2), bool))
