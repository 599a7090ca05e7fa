"""Proves that progress is a bar on a terminal and plain, rare lines elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios

from lacuna.basics.progress import progress

SCRIPT = "from lacuna.basics.progress import progress\nfor _ in progress(range(500), 500, 'packing', 'samples'): pass"


def test_plain_lines(capsys):
    assert list(progress(range(500), 500, "packing", "samples")) == list(range(500))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, "500 steps do not flood the log"
    assert lines[0].startswith("packing: 500 of 500 samples, ")


def test_no_line_comes_twice(capsys, monkeypatch):
    monkeypatch.setattr("lacuna.basics.progress._SECONDS_BETWEEN_LINES", 0.0)
    assert list(progress(range(3), 3, "packing")) == [0, 1, 2]
    assert [line.partition(" it")[0] for line in capsys.readouterr().err.splitlines()] == [
        "packing: 1 of 3", "packing: 2 of 3", "packing: 3 of 3"]


def test_bar_on_a_terminal():
    main, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 100))
    subprocess.run([sys.executable, "-c", SCRIPT], stderr=terminal, check=True)
    os.close(terminal)
    text = os.read(main, 100_000).decode()
    os.close(main)
    assert "packing: 100%" in text
    assert "500/500" in text
