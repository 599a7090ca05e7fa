"""The matrix under kills: rounds follow from the seed, kills fall where they should, no difference is overlooked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from lacuna.basics import storage
from lacuna.tools.bench import s3_stand_in
from lacuna.tools.cli import main
from lacuna.tools.drill.matrix import cells_of, summary, table
from lacuna.tools.drill.matrix.cells import METHODS, RANKS, STAGES, STORAGES
from lacuna.tools.drill.matrix.damage import HARMS, harm_something
from lacuna.tools.drill.matrix.events import Events
from lacuna.tools.drill.matrix.rounds import Result, draw
from tests.helpers.launching import ROOT, environment

CELLS = cells_of(list(METHODS), list(STAGES), list(STORAGES))


def test_rounds_follow_from_the_seed_and_cover_the_matrix():
    rounds = [draw(3, number, CELLS) for number in range(1000)]
    assert rounds == [draw(3, number, CELLS) for number in range(1000)]
    assert rounds != [draw(4, number, CELLS) for number in range(1000)]
    assert {cell for cell, _ in rounds} == set(CELLS)
    assert len(CELLS) == 30
    blows = [blow for _, mine in rounds for blow in mine]
    assert {blow.ranks for blow in blows} == set(RANKS)
    assert all(blow.victim < blow.ranks for blow in blows)
    assert {blow.disturbance for blow in blows} == {"", "pause", "term", "full_disk", "outage", "freeze"}
    assert {blow.harm for blow in blows} == {"", *HARMS}
    changing = [len({blow.ranks for blow in mine}) > 1 for cell, mine in rounds if cell.stage == "zero0"]
    assert 0.3 < sum(changing) / len(changing) < 0.7


@pytest.mark.parametrize("everybody", [False, True])
def test_a_process_dies_at_the_event_that_was_chosen(tmp_path, everybody):
    """Of four events (before and after two writes) the third kills it: the first file is there, the second is not."""
    events = Events(1)
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        events.watch(0, 3 if everybody else 0, everybody)
        storage.write_new(str(tmp_path / "first"), [b"1"])
        if not everybody:
            events.watch(0, 1, everybody)
        storage.write_new(str(tmp_path / "second"), [b"2"])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "first").read_bytes() == b"1"
    assert not (tmp_path / "second").exists()
    assert events.last(0).startswith("before write_new ")
    assert events.last(0).endswith("/second")


@pytest.mark.parametrize("harm", HARMS)
def test_harm_changes_one_file_of_the_newest_checkpoint(tmp_path, harm):
    for step in (3, 6):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        for name in ("COMMIT.json", "model.safetensors"):
            (folder / name).write_bytes(b"whole")
        if step == 3:
            assert harm_something(str(tmp_path), harm, 0.5) == "", "of one checkpoint alone nothing would be left"
    name = harm_something(str(tmp_path), harm, 0.5)
    assert name.startswith("checkpoints/step-00000006/")
    assert not (tmp_path / name).exists() if harm == "deleted" else (tmp_path / name).read_bytes() != b"whole"


def test_a_difference_is_told_with_what_it_takes_to_see_it_again(capsys):
    good, bad = Result("role-zero0-local", kills=4, early=1, faults=2, launches=6, survived=[0.5, 2.0]), Result(
        "csl-zero1-s3", kills=3, launches=4, differences=["model.safetensors"], events=["after fsync"])
    lines = [{"round": number, "seed": 7, **result.line()} for number, result in enumerate((good, bad))]
    lines[1]["smallest"] = [{"ranks": 2}]
    report = summary(lines)
    assert (report["kills"], report["early_kills"], report["other_faults"], report["mismatches"]) == (7, 1, 2, 1)
    assert report["survived_seconds"] == {"median": 1.25, "worst": 2.0}
    text = table(report, "there", 7)
    assert "lacuna drill --matrix --folder there --seed 7 --round 1" in text
    assert 'did it: [{"ranks": 2}]' in text


def test_the_server_fails_now_and_then_and_on_demand():
    import http.client

    process, port = s3_stand_in.start("lacuna.tools.bench.failing_s3")
    try:
        def ask() -> int:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("PUT", "/bucket/x", b"hello")
            return connection.getresponse().status

        answers = [ask() for _ in range(300)]
        assert set(answers) == {200, 500, 503}
        assert answers.count(200) > 250
        process.send_signal(signal.SIGUSR1)
        while ask() != 503 or ask() != 503 or ask() != 503:
            pass
        process.send_signal(signal.SIGUSR2)
        while ask() != 200:
            pass
    finally:
        process.terminate()
        process.wait(60)


def test_mistakes_are_named(capsys, tmp_path):
    (tmp_path / "rounds.jsonl").write_text(json.dumps({"round": 0, "seed": 5}) + "\n")
    (tmp_path / "data").mkdir()
    for arguments, message in ((["--matrix"], "give --folder"), (["--zero", "zero1"], "--zero is for the matrix only"),
                               (["--matrix", "--folder", str(tmp_path), "--zero", "zero3"], "there are zero0, zero1"),
                               (["--matrix", "--folder", str(tmp_path)], "were drawn with --seed 5, not 0")):
        assert main(["drill", *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.long
def test_rounds_end_as_if_nothing_had_happened(tmp_path):
    """In a process of its own, which must have no threads."""
    words = [sys.executable, "-m", "lacuna.tools.cli", "drill", "--matrix", "--folder", str(tmp_path), "--json"]
    for rounds in ("4", "6"):  # the second command goes on where the first ended
        done = subprocess.run([*words, "--rounds", rounds], env=environment(), cwd=ROOT, capture_output=True, text=True,
                              timeout=3000)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["rounds"], report["mismatches"]) == (6, 0)
    assert report["kills"] >= 6
    assert done.stderr.count("equal") == 2


@pytest.mark.long
def test_kills_of_bare_stores(tmp_path):
    words = [sys.executable, "-m", "tests.helpers.state.many_kills", "150", "--folder", str(tmp_path)]
    done = subprocess.run(words, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
