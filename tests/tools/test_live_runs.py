"""Proves that commands can read a run while it is written: checkpoints every third step, removed under the readers."""

from __future__ import annotations

import os
import signal
import time

import pytest

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.tools.cli import main
from lacuna.tools.run_files import while_written
from tests.helpers.launching import Launch
from tests.helpers.run_configs import en_scl_config


def live(shards, folder, **more) -> Launch:
    body = en_scl_config(shards, "live")
    body["phases"][0]["epochs"] = 5000
    body["train"] |= {"checkpoint_every": "3st", "keep": 2, "trace_samples": False, "log_every": 50, "eval_every": 3}
    return Launch({**body, **more}, folder, 1)


def commits(url: str) -> list[str]:
    names = [name for name in storage.list_names(f"{url}/checkpoints") if name.startswith("step-")]
    return [name for name in names if storage.exists(f"{url}/checkpoints/{name}/COMMIT.json")]


def read_while_written(launch: Launch, url: str, commands: list[list[str]], rounds: int, capsys) -> None:
    launch.wait_until(lambda: len(commits(url)) >= 2, "two checkpoints")
    try:
        for number in range(rounds):
            before = commits(url)
            for words in commands:
                code = main([word.format(number=number) for word in words])
                said = capsys.readouterr()
                assert code == 0, (words, said.err)
                if words[0] == "state" and "verify" in words:
                    assert " no problems" in said.out
                assert launch.process.poll() is None, launch.text()[-3000:]
            assert commits(url) != before, "nothing was replaced under the readers"
    finally:
        launch.signal_all(signal.SIGKILL)
        launch.wait()


def quick_commands(url: str, out) -> list[list[str]]:
    return [["report", url, "--out", f"{out}/report.html", "--samples", "100"], ["inspect", url, "--json", "--values"],
            ["heatmaps", url, "--out", f"{out}/maps.png"], ["state", "verify", f"{url}/state"],
            ["state", "snapshots", f"{url}/state"],
            ["state", "export", url, "--to", f"{out}/{{number}}.zarr"]]


def passes(url: str, shards, out) -> list[list[str]]:
    few = ["--workers", "1"]
    return [["eval", url, "--protocol", "multilabel", "--shards", str(shards / "test"), *few],
            ["prior", url, "--out", f"{out}/prior", *few],
            ["suggest", url, "--out", f"{out}/table.csv", *few],
            ["export", url, "--out", f"{out}/model", "--no-onnx", "--overwrite"],
            ["explore", url, "--index-only", *few], ["report", url, "--score", "--out", f"{out}/report.html"]]


def test_a_run_on_a_disk(single_shards, tmp_path, capsys):
    launch = live(single_shards, tmp_path)
    read_while_written(launch, str(launch.folder), quick_commands(str(launch.folder), tmp_path), 2, capsys)


@pytest.mark.long
def test_passes_over_a_run_on_a_disk(single_shards, tmp_path, capsys):
    launch = live(single_shards, tmp_path)
    url = str(launch.folder)
    read_while_written(launch, url, [*passes(url, single_shards, tmp_path), *quick_commands(url, tmp_path)], 3, capsys)
    assert not [name for name in storage.list_names(f"{url}/passes") if name.startswith("weights-")]


@pytest.mark.long
def test_a_run_on_object_storage(single_shards, tmp_path, capsys, s3):
    launch = live(single_shards, tmp_path, run_folder="s3://bucket/runs")
    url, before = "s3://bucket/runs/live", os.getcwd()
    os.chdir(tmp_path)  # where results about a remote run go
    try:
        commands = [*quick_commands(url, tmp_path), *passes(url, single_shards, tmp_path)]
        read_while_written(launch, url, commands, 2, capsys)
    finally:
        os.chdir(before)


def committed(run, number: int) -> None:
    (run / "checkpoints" / f"step-{number:08d}").mkdir(parents=True)


def test_a_failure_is_looked_at_again_only_when_something_was_committed(tmp_path):
    committed(tmp_path, 0)
    tries: list[int] = []

    def fails() -> None:
        tries.append(1)
        raise UserError("chunk x is missing")

    with pytest.raises(UserError, match=r"^chunk x is missing$"):
        while_written(str(tmp_path), fails)
    assert len(tries) == 1

    def replaced() -> str:
        tries.append(1)
        committed(tmp_path, len(tries))
        if len(tries) < 4:
            raise FileNotFoundError("gone")
        return "found"

    assert while_written(str(tmp_path), replaced) == "found"

    def always() -> None:
        committed(tmp_path, 100 + time.monotonic_ns())
        raise UserError("chunk x is missing")

    with pytest.raises(UserError, match=r"is being written, and 12 times in a row .* Nothing is damaged: try again"):
        while_written(str(tmp_path), always)
