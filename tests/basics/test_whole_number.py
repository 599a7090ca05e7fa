"""Only what is a plain number in ASCII digits counts as one, and nothing makes it raise."""

from __future__ import annotations

import pytest

from lacuna.basics.errors import UserError
from lacuna.basics.whole_number import whole_number
from lacuna.data_pipelines.indexing import ClassNumbers
from lacuna.data_pipelines.readers.base import ClassNames


def test_numbers():
    assert [whole_number(text) for text in ("0", " 17\n", "007", "9" * 18)] == [0, 17, 7, 10**18 - 1]


@pytest.mark.parametrize("text", ["", "-1", "--1", "1.0", "1e3", "0x1", "1_000", "¹", "٣", "9" * 19, "9" * 5000])
def test_what_is_none(text):
    assert whole_number(text) is None
    with pytest.raises(UserError, match="here"):
        ClassNames(["cat", "dog"], ["c", "d"]).index(text, "here")
    with pytest.raises(UserError, match="here"):
        ClassNumbers().index(text, "here")
