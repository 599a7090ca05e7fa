"""Proves that the two fields of a top-k table are as narrow as the columns allow and start untracked."""

from __future__ import annotations

import pytest

from lacuna.basics.errors import UserError
from lacuna.state_store.topk import UNTRACKED, topk_fields


def test_fields_of_a_table():
    ids, values = topk_fields("heat", 10, 1000, "uint8", (14, 14), range=(0, 1))
    assert (ids.dtype, ids.shape, values.shape) == ("int16", (10,), (10, 14, 14))
    assert (ids.initial_rows(0, 0, 2) == UNTRACKED).all()
    assert topk_fields("phi", 5, 2**15, "float16")[0].dtype == "int16"
    assert topk_fields("phi", 5, 2**15 + 1, "float16")[0].dtype == "int32"


@pytest.mark.parametrize("k", [0, 11])
def test_k_is_checked(k):
    with pytest.raises(UserError, match=rf"k = {k}.*1\.\.10"):
        topk_fields("x", k, 10, "uint8")
