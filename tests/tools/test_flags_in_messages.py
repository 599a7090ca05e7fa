"""Proves that a message about data names only flags that the command which shows it has."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from lacuna.data_pipelines.readers import READERS
from lacuna.tools.cli import leaves, open_command

ROOT = Path(__file__).resolve().parents[2]
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_MAKE = [f"shards make {name}" for name in READERS]
_WITH_IMAGES = [f"shards make {name}" for name in
                ("folder", "imagenet", "coco", "coco_panoptic", "lvis", "nuswide", "tsv")]
# Which commands show the messages of a module; readers that are not here belong to the command of their name.
SHOWN_BY = {
    "data_pipelines/annotation/": ["annotate"],
    "data_pipelines/subsets.py": ["annotate"],
    "data_pipelines/encoding.py": _MAKE,
    "data_pipelines/output_folder.py": _MAKE,
    "data_pipelines/packing.py": _MAKE,
    "data_pipelines/indexing.py": ["shards index"],
    "data_pipelines/score_tables.py": ["import-scores"],
    "data_pipelines/readers/base.py": _WITH_IMAGES,
    "data_pipelines/readers/coco.py": ["shards make coco", "shards make coco_panoptic"],
    "data_pipelines/readers/ground_truth.py": ["shards make imagenet", "eval"],
    "data_pipelines/readers/openimages/": ["shards make openimages"],
    "tools/eval/truth.py": ["eval"],
    "tools/annotate.py": ["annotate"],
    "tools/shards.py": ["shards check"],  # its only message points to --json
}


def messages(path: Path) -> list[tuple[int, str]]:
    """(line, text) of the literals that are neither docstrings nor part of a parser's or a reader's description."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left_out: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and any(
                isinstance(first, ast.Expr) for first in node.body[:1]):
            left_out.add(id(node.body[0].value))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
                "add_argument", "Reader"):
            left_out |= {id(inner) for inner in ast.walk(node)}
    return [(node.lineno, node.value) for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in left_out]


def commands(module: str) -> list[str] | None:
    for start, shown_by in SHOWN_BY.items():
        if module.startswith(start):
            return shown_by
    name = Path(module).stem
    return [f"shards make {name}"] if name in READERS and "/readers/" in module else None


@functools.cache
def flags_of(command: str) -> set[str]:
    first = command.split()[0]
    leaf = next(leaf for leaf in leaves(open_command(first)[1]) if leaf.prog == f"lacuna {command}")
    return set(leaf._option_string_actions)


MODULES = sorted({str(path.relative_to(ROOT)) for path in (ROOT / "data_pipelines").rglob("*.py")}
                 | {"tools/shards.py", "tools/annotate.py", "tools/eval/truth.py"})


@pytest.mark.parametrize("module", [m for m in MODULES if any(_FLAG.search(t) for _, t in messages(ROOT / m))])
def test_flags_in_messages_exist(module):
    shown_by = commands(module)
    assert shown_by, f"{module} names flags: say in SHOWN_BY which commands show its messages"
    for command in shown_by:
        known = flags_of(command)
        for line, text in messages(ROOT / module):
            # A message may send the reader to `shards make`, whose packing options all readers share.
            legal = known | set.intersection(*map(flags_of, _MAKE)) if "`lacuna shards make`" in text else known
            unknown = [flag for flag in _FLAG.findall(text) if flag not in legal]
            assert not unknown, f"{module}:{line} names {unknown}, which `lacuna {command}` does not have"


@pytest.mark.parametrize("name", READERS)
def test_readers_that_refuse_missing_files_can_skip_them(name):
    module = ROOT / "data_pipelines/readers" / f"{READERS[name].read.__module__.rsplit('.', 1)[-1]}.py"
    if module.exists() and "without_missing(" in module.read_text(encoding="utf-8"):
        known = flags_of(f"shards make {name}")
        assert "--skip-missing" in known
        assert ("--images" in known) == (f"shards make {name}" in _WITH_IMAGES)
