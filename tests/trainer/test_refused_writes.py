"""Launches that may not write say why in one sentence, end with code 2, and go on when the cause is gone."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.launching import Launch, assert_equal_weights
from tests.helpers.run_configs import config
from tests.helpers.small_disk import fill


def body_on(shards, disk: Path) -> dict:
    body = config(shards, "full")
    body["phases"], body["run_folder"] = [{**body["phases"][1], "epochs": 1}], str(disk)
    return body


def said(launch: Launch) -> str:
    code = launch.wait()
    assert code == 2, f"{code}: {launch.text()[-3000:]}"
    assert "Traceback" not in launch.text(), launch.text()[-3000:]
    return launch.text()


def test_a_full_disk_at_the_start_and_at_a_checkpoint(digit_shards, tmp_path, small_disk):
    """Nothing was written yet: it says that the run begins anew. Once there is room it does, to the same end."""
    body = body_on(digit_shards, small_disk)
    fill(small_disk)
    assert "there is no space left on its disk" in said(Launch(body, tmp_path, 1))
    os.truncate(small_disk / "filler", os.path.getsize(small_disk / "filler") - 60_000)  # for logs, not for weights
    text = said(Launch(body, tmp_path, 1))
    assert "this checkpoint could not be written" in text
    assert "the run begins anew, as no checkpoint was finished before" in text
    os.remove(small_disk / "filler")
    launch = Launch(body, tmp_path, 1)
    launch.ok()
    calm = Launch({**body, "name": "calm", "run_folder": str(tmp_path)}, tmp_path, 1)
    calm.ok()
    assert_equal_weights(small_disk / "full", tmp_path / "calm")


@pytest.mark.parametrize(("prepare", "undo", "words"), [
    (["chattr", "+i"], ["chattr", "-i"], "whether it is immutable"),
    (["mount", "--bind", "-o", "ro"], ["umount"], "mounted read-only"),
])
@pytest.mark.long
def test_a_run_folder_that_cannot_be_written(digit_shards, tmp_path, prepare, undo, words):
    place = tmp_path / "place"
    (place / "full").mkdir(parents=True)
    target = [str(place / "full")] * (2 if prepare[0] == "mount" else 1)
    if shutil.which(prepare[0]) is None or subprocess.run([*prepare, *target], capture_output=True).returncode:
        pytest.skip(f"{prepare[0]} does not work here")
    try:
        assert words in said(Launch(body_on(digit_shards, place), tmp_path, 1))
    finally:
        subprocess.run([*undo, str(place / "full")], check=True)
    Launch(body_on(digit_shards, place), tmp_path, 1).ok()


@pytest.mark.long
def test_a_storage_that_goes_away(digit_shards, tmp_path, small_disk):
    """The mount vanishes under a run: it says so and ends; mounted again, the run goes on."""
    body = body_on(digit_shards, small_disk)
    body["phases"][0]["epochs"] = 500
    launch = Launch(body, tmp_path, 1)
    launch.folder = small_disk / "full"
    launch.wait_for_step(8)
    kept = tmp_path / "kept"
    shutil.copytree(small_disk / "full", kept, ignore_dangling_symlinks=True)
    subprocess.run(["umount", "-l", str(small_disk)], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m,mode=755", "tmpfs", str(small_disk)], check=True)
    assert "no longer mounted?" in said(launch)
