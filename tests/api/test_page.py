"""Proves that every example of docs/api.md runs, one after another, as a reader would type them."""

from __future__ import annotations

import re
import subprocess
import sys

import lacuna
from tests.helpers.launching import ROOT, environment

PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def test_every_block_runs(single_shards, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == PAGE.count("```") // 2 >= 6
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "data").symlink_to(single_shards)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(done.stdout.splitlines()) >= 5


def test_the_page_names_what_is_public():
    functions = {name for name in lacuna.__all__ if name[0].islower()}
    assert {name for name in functions if f"lacuna.{name}" not in PAGE and f"`{name}`" not in PAGE} == set()
    used = set(re.findall(r"lacuna\.([a-z_]\w*)\(", PAGE))
    assert used <= functions
