"""Run folders of strangers: whatever their files hold, reading commands end in a page or in an error that names one."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from lacuna.basics.errors import UserError
from lacuna.tools import report
from lacuna.tools.passes.trained import open_trained, read_weights
from lacuna.tools.report.comparing import class_table, config_differences
from lacuna.tools.report.page import render
from lacuna.tools.report.recorded_run import RecordedRun
from lacuna.trainer.checkpoints.commits import signed
from tests.helpers.fuzzing import Targets, damaged_bytes, damaged_json, fuzz_all, lines_of
from tests.helpers.stranger_runs import FILES, LINES, STEP, TABLE, make_run, sign

ALLOWED = (UserError,)
ARGUMENTS = argparse.Namespace(full_labels="labels", samples=10, score=False, images=2)


def read_report(run: Path) -> None:
    facts, absent = report._run_data(str(run), ARGUMENTS)
    recorded = [RecordedRun.open(str(run))]
    render({"runs": [facts], "absent": absent, "classes": class_table(recorded),
            "config": config_differences(recorded), "gap": None})


def read_model(run: Path) -> None:
    for tensor in read_weights(open_trained(str(run))).values():
        assert tensor.numel() == math.prod(tensor.shape)


def targets(folder: Path) -> Targets:
    run = folder / "run"
    make_run(run)

    def of(name: str, *readers):
        good = (run / name).read_bytes()

        def attempt(data: bytes) -> None:
            (run / name).write_bytes(data)
            try:
                if name.endswith(".safetensors"):
                    sign(run, {})
                for read in readers:
                    read(run)
            finally:
                (run / name).write_bytes(good)
                sign(run, {})
        return attempt

    def kept(name: str) -> bytes:
        return (run / name).read_bytes()

    commit = json.loads(kept(f"{STEP}/COMMIT.json"))

    def committed(data: bytes) -> None:
        try:
            body = json.loads(data)
            body.pop("sha256", None)
            (run / STEP / "COMMIT.json").write_bytes(signed(body))
        except (ValueError, AttributeError, TypeError, RecursionError):
            (run / STEP / "COMMIT.json").write_bytes(data)
        try:
            read_model(run)
        finally:
            sign(run, {})

    return {
        **{f"run {name}": (damaged_json(kept(name)), of(name, read_report, read_model)) for name in FILES},
        "run metrics": (lines_of(damaged_json(json.dumps(LINES[0]).encode())), of("metrics.jsonl", read_report)),
        "run metrics bytes": (damaged_bytes(kept("metrics.jsonl")), of("metrics.jsonl", read_report)),
        "run classes": (damaged_bytes(TABLE.encode()), of("test_classes.csv", read_report)),
        "run weights": (damaged_bytes(kept(f"{STEP}/model.safetensors")), of(f"{STEP}/model.safetensors", read_model)),
        "run commit": (damaged_json(json.dumps(commit).encode()), committed),
    }


def test_files_of_strangers(tmp_path):
    fuzz_all(targets(tmp_path), ALLOWED)
