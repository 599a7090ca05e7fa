"""Files that unpack to far more than they are, and honest ones that compress well, are told apart before reading."""

from __future__ import annotations

import zipfile

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.score_tables import read_table
from lacuna.tools.eval.predictions import read_predictions


def bomb(path, size: int) -> str:
    """An .npz whose `scores` claim a header and so many zeros, written piece by piece."""
    layout = f"{{'descr': '<f4', 'fortran_order': False, 'shape': (1, {size // 4}), }}"
    header = b"\x93NUMPY\x01\x00v\x00" + layout.ljust(117).encode() + b"\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("scores.npy", "w",
                                                                                  force_zip64=True) as out:
        out.write(header)
        for _ in range(size >> 24):
            out.write(bytes(1 << 24))
    return str(path)


@pytest.fixture(scope="module")
def bombs(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("bombs")
    column = pa.array(np.zeros(1 << 20, np.float32))
    table = pa.table({"key": pa.DictionaryArray.from_arrays(np.zeros(1 << 20, np.int8), ["k"]),
                      **{f"c{c}": column for c in range(130)}})
    parquet.write_table(table, folder / "b.parquet")
    return [bomb(folder / "b.npz", 5 << 28), str(folder / "b.parquet")]


@pytest.mark.parametrize("number", [0, 1])
def test_bombs_are_refused_before_they_are_unpacked(bombs, tmp_path, number):
    for read in (lambda path: read_predictions([path]), lambda path: read_table(path, str(tmp_path))):
        with pytest.raises(UserError, match="more than 50 times as many"):
            read(bombs[number])
    assert list(tmp_path.rglob("*.npy")) == [], "nothing was written"


def test_honest_files_that_compress_well_are_read(tmp_path):
    np.savez_compressed(tmp_path / "p.npz", scores=np.zeros((1000, 500), np.float32))
    assert (tmp_path / "p.npz").stat().st_size < 2_000_000 / 50
    assert len(read_predictions([str(tmp_path / "p.npz")])) == 1000
