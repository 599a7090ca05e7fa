"""Proves that sparse labels say the same as the dense ternary matrix, and that illegal ones are named by row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN, SparseLabels

ternary = hnp.arrays(np.int8, hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=8),
                     elements=st.sampled_from([POSITIVE, NEGATIVE, UNKNOWN]))


@given(ternary)
def test_dense_round_trip(dense):
    labels = SparseLabels.from_dense(dense)
    assert np.array_equal(labels.dense(dense.shape[1]), dense)
    pos, neg = labels.class_counts(dense.shape[1])
    assert pos.tolist() == (dense == POSITIVE).sum(0).tolist()
    assert neg.tolist() == (dense == NEGATIVE).sum(0).tolist()


@given(ternary, st.data())
def test_take_is_dense_indexing(dense, data):
    rows = np.array(data.draw(st.lists(st.integers(0, len(dense) - 1), max_size=12)), dtype=np.int64)
    labels = SparseLabels.from_dense(dense)
    assert np.array_equal(labels.take(rows).dense(dense.shape[1]), dense[rows])
    assert np.array_equal(labels.dense(dense.shape[1], rows), dense[rows])


def test_full_labels_need_no_negatives():
    dense = np.array([[1, 0, 0], [0, 1, 1]], dtype=np.int8)
    labels = SparseLabels.from_dense(dense, NEGATIVE)
    assert len(labels.neg_ids) == 0
    assert np.array_equal(labels.dense(3), dense)
    assert [c.tolist() for c in labels.class_counts(3)] == [[1, 1, 1], [1, 1, 1]]


def test_lists_are_sorted_and_deduplicated():
    labels = SparseLabels.from_lists([[5, 1, 5], []], [[2], [0, 0]])
    assert labels.positives(0).tolist() == [1, 5]
    assert labels.negatives(1).tolist() == [0]
    assert labels.take(np.array([1, 0])).positives(1).tolist() == [1, 5]


def test_errors_name_row_and_value():
    with pytest.raises(UserError, match=r"row 1 has positive class id 7.*0\.\.2"):
        SparseLabels.from_lists([[0], [7]], [[], []]).check(3, "here")
    with pytest.raises(UserError, match="row 0 has negative class id -2"):
        SparseLabels.from_lists([[0]], [[-2]]).check(3, "here")
    with pytest.raises(UserError, match="here: row 1 has class id 2 as positive and as negative"):
        SparseLabels.from_lists([[2], [2]], [[1], [2]]).check(3, "here")
