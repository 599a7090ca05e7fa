"""Proves that people see of a search what its runs wrote: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import json
import os
import sys

import pytest

from lacuna.tools.trials.job import Job, Outcome, placed
from lacuna.tools.trials.watching import Watching
from tests.helpers.small_runs import body


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 2


@pytest.fixture
def job(tmp_path) -> Job:
    made = Job("an-0003", placed(body(tmp_path, "unused"), str(tmp_path), "an-0003", "test"), epochs=3)
    os.makedirs(made.config.folder)
    return made


def train(job: Job, *scores: float) -> None:
    with open(os.path.join(job.config.folder, "metrics.jsonl"), "a", encoding="utf-8") as f:
        for step, score in enumerate(scores):
            f.write(json.dumps({"kind": "epoch", "step": step, "phase": "all", "val_map_skip_empty": score}) + "\n")


def test_a_terminal(job, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(os, "get_terminal_size", lambda descriptor: os.terminal_size((100, 40)))
    with Watching(str(tmp_path), lambda jobs: 3.0 * len(jobs), lambda: "Best: nobody.", slots=1) as watching:
        watching.began(job)
        train(job, 50.25, 49.5)
        watching.look([job], [job])
        text = sys.stderr.getvalue()
        assert "1 at work, 1 waiting. Best: nobody." in text
        assert "an-0003                      epoch   2 of   3  val mAP  49.50, best  50.25" in text
        watching.ended(job, Outcome("paused", 50.25))
    shown = sys.stderr.getvalue()[len(text):]
    assert shown.startswith("\x1b[2F\x1b[J"), "the table makes room for the line"
    assert "an-0003: 3 epochs, val mAP 50.25; about 0:00:0" in shown
    assert "left" in (tmp_path / "log.txt").read_text()


def test_elsewhere(job, tmp_path, capsys):
    with Watching(str(tmp_path), lambda jobs: 3.0 * len(jobs), lambda: "", slots=1) as watching:
        watching.began(job)
        watching.look([job], [])
        watching.ended(job, Outcome("failed", reason="the loss is nan"))
    err = capsys.readouterr().err
    assert "an-0003: failed: the loss is nan" in err
    assert "\x1b" not in err
    assert "failed: the loss is nan" in (tmp_path / "log.txt").read_text()
