"""Damaged prediction files, score tables, ReaL labels and priors end in errors that name them, in time."""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.score_tables import read_table
from lacuna.tools.eval.predictions import read_predictions
from lacuna.tools.eval.truth import ValLabels, read_real
from tests.helpers.fuzzing import damaged_bytes, damaged_json, fuzz_all

CLASSES = 4
SCORES = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, CLASSES)
LISTED = np.array([[0, 3], [2, 1], [1, 0]])
KEYS = ["a", "b", "c"]


def saved(save, *arrays, **named) -> bytes:
    buffer = io.BytesIO()
    save(buffer, *arrays, **named)
    return buffer.getvalue()


def a_parquet() -> bytes:
    table = pa.table({"key": KEYS, "scores": SCORES[:, :2].tolist(), "classes": LISTED.tolist()})
    return saved(lambda buffer: parquet.write_table(table, buffer))


def targets(folder: Path) -> dict:
    def predictions(name: str):
        def attempt(data: bytes) -> None:
            (folder / name).write_bytes(data)
            found = read_predictions([str(folder / name)])
            found.check(CLASSES)
            found.dense(np.arange(len(found)), CLASSES)
        return attempt

    def table(name: str):
        def attempt(data: bytes) -> None:
            (folder / name).write_bytes(data)
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                read_table(str(folder / name), scratch, None, None)
        return attempt

    def written(use):
        def attempt(data: bytes) -> None:
            (folder / "text").write_bytes(data)
            use(str(folder / "text"))
        return attempt

    npz = saved(np.savez, scores=SCORES[:, :2], classes=LISTED, keys=np.array(KEYS))
    table_npz = saved(np.savez, scores=SCORES, classes=np.array(["w", "x", "y", "z"]), keys=np.array(KEYS))
    wide = pa.table({"key": KEYS, **{f"class {c}": SCORES[:, c] for c in range(CLASSES)}})
    return {
        "npy": (damaged_bytes(saved(np.save, SCORES)), predictions("p.npy")),
        "npz": (damaged_bytes(npz), predictions("p.npz")),
        "parquet": (damaged_bytes(a_parquet()), predictions("p.parquet")),
        "table npz": (damaged_bytes(table_npz), table("t.npz")),
        "table parquet": (damaged_bytes(saved(lambda buffer: parquet.write_table(wide, buffer))), table("t.parquet")),
        "real": (damaged_json(json.dumps([[0, 2], [], [3]]).encode()), written(lambda p: read_real(p, CLASSES))),
        "originals": (damaged_bytes(b"0\n3\n1\n"), written(lambda p: ValLabels(p, []).read(3, CLASSES))),
    }


ALLOWED = (UserError,)


def test_damaged_predictions(tmp_path):
    fuzz_all(targets(tmp_path), ALLOWED)
