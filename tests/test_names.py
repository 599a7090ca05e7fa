"""Proves that there is one import name, lacuna.…, and that tests share code through tests/helpers alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("trainer", "state_store", "data_pipelines", "tools")
_LOAD_ALL = """
import importlib, pkgutil, sys
import lacuna
for module in pkgutil.walk_packages(lacuna.__path__, "lacuna."):
    if not module.name.endswith("__main__") and not module.name.startswith("lacuna.configs"):
        importlib.import_module(module.name)
print(*sorted(set(sys.modules) & {"trainer", "state_store", "data_pipelines", "tools", "tests"}))
"""


def test_all_modules_load_under_one_name():
    done = subprocess.run([sys.executable, "-c", _LOAD_ALL], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_no_test_loaded_a_room_by_its_folder():
    assert not set(ROOMS) & set(sys.modules)


def test_no_text_imports_a_room_by_its_folder():
    """Code inside strings (child processes, examples in documents) would load a module twice."""
    files = subprocess.run(["git", "ls-files", "*.py", "*.md"], capture_output=True, text=True, cwd=ROOT).stdout.split()
    words = tuple(f"{verb} {room}{end}" for verb in ("from", "import") for room in ROOMS for end in (".", " import"))
    for name in files:
        text = (ROOT / name).read_text(encoding="utf-8")
        found = [line for line in text.splitlines() if line.strip().startswith(words)]
        assert not found, (name, found)


def test_tests_share_through_helpers():
    """No test imports another one, and every folder is a package, so that two files may have one name."""
    folder = ROOT / "tests"
    for path in folder.rglob("*.py"):
        assert (path.parent / "__init__.py").exists(), path.parent
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [line for line in lines if line.startswith(("from tests.", "import tests.")) and ".test_" in line]
        assert not found, (path, found)


def test_rooms_import_downwards_only():
    """basics ← data_pipelines, state_store ← trainer ← tools ← api; the two in the middle do not know each other."""
    floor = {"basics": 0, "data_pipelines": 1, "state_store": 1, "trainer": 2, "tools": 3, "api": 4}
    for room in floor:
        for path in (ROOT / "src" / "lacuna" / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [f"{node.module}.{a.name}" for a in node.names] if isinstance(node, ast.ImportFrom) else (
                    [a.name for a in node.names] if isinstance(node, ast.Import) else [])
                used = {words[1] for name in names if len(words := name.split(".")) > 1 and words[0] == "lacuna"}
                above = [other for other in used & set(floor) - {room} if floor[other] >= floor[room]]
                assert not above, f"{path}:{node.lineno} imports from {above}"
