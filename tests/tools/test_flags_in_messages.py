"""Proves that what messages advise exists: flags of the command that shows them, other commands, and config keys."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from lacuna.data_pipelines.readers import READERS
from lacuna.tools.bench import BENCHES
from lacuna.tools.cli import COMMANDS, leaves, open_command
from lacuna.trainer.config import data_section, sections
from lacuna.trainer.methods import METHODS

ROOT = Path(__file__).resolve().parents[2]
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
_MAKE = [f"shards make {name}" for name in READERS]
_WITH_IMAGES = [f"shards make {name}" for name in
                ("folder", "imagenet", "coco", "coco_panoptic", "lvis", "nuswide", "tsv")]
# Which commands show the messages of a module; readers that are not here belong to the command of their name.
SHOWN_BY = {
    "data_pipelines/annotation/": ["annotate"],
    "data_pipelines/wordnet.py": ["relation hierarchy", "scores"],
    "data_pipelines/subsets.py": ["annotate"],
    "data_pipelines/groups.py": ["annotate"],
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
    found = []
    for node in ast.walk(tree):
        if id(node) in left_out:
            continue
        if isinstance(node, ast.JoinedStr):  # what is filled in stands as X
            found.append((node.lineno, "".join(str(part.value) if isinstance(part, ast.Constant) else "X"
                                               for part in node.values)))
            left_out |= {id(part) for part in node.values}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((node.lineno, node.value))
    return found


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


# ---- every other message: commands in backticks, flags of the command whose folder it is in, keys of the config

SOURCES = sorted(path for folder in ("data_pipelines", "state_store", "trainer", "tools", "src/lacuna/api",
                                     "src/lacuna/basics") for path in (ROOT / folder).rglob("*.py"))
_ADVISED = re.compile(r"`lacuna ([^`]+)`")
_FILES = ("data.noun", "data.pkl", "model.safetensors", "model.onnx")  # look like keys
_OTHERS = ("deepspeed", "in Docker", "pip install")  # whose flags are meant
_KEY = re.compile(r"(?<![\w./{`])(data|model|train|phases|method)\.([a-z0-9_.]+)")


def keys(kind: type) -> dict[str, object]:
    """Name → the section under it, or None."""
    found = {}
    for name, field in kind.model_fields.items():
        text = str(field.annotation)
        inner = next((part for part in (*vars(sections).values(), *vars(data_section).values())
                      if isinstance(part, type) and issubclass(part, data_section.Section)
                      and f".{part.__name__}" in text.replace("'", ".")), None)
        found[name] = inner
    return found


def key_exists(section: str, rest: str) -> bool:
    here: object = keys(sections.Config)[section]
    if section == "method":
        settings = {name for kind in METHODS.values() for name in kind.settings_type.model_fields}
        return rest.split(".")[0] in settings | {"name"}
    for part in rest.strip(".").split("."):
        if part.isdigit() and section == "phases":
            continue
        legal = keys(here) if isinstance(here, type) else {}
        if part not in legal:
            return False
        here = legal[part]
    return True


def all_flags(command: str) -> set[str]:
    """Of a command whatever its action, or of one action."""
    found = [leaf for leaf in leaves(open_command(command.split()[0])[1])
             if (leaf.prog + " ").startswith(f"lacuna {command} ")]
    return {flag for leaf in found for flag in leaf._option_string_actions} | {"--help"}


def advised_wrongly(text: str) -> str | None:
    """Of a command that a message advises: what is wrong with it."""
    words = text.split()
    if words[0] not in COMMANDS:
        return None if words[0] in ("…", "--version", "--help", "COMMAND", "X") else f"no command {words[0]}"
    actions = {leaf.prog.removeprefix("lacuna ") for leaf in leaves(open_command(words[0])[1])} - {words[0]}
    named = words[0]
    if words[0] == "bench":
        return None if len(words) < 2 or words[1] in BENCHES or words[1].isupper() else f"no benchmark {words[1]}"
    for word in words[1:]:
        if any((action + " ").startswith(f"{named} {word} ") for action in actions):
            named = f"{named} {word}"
    if actions and len(words) > 1 and named == words[0] and words[1].islower() and words[1].isalpha():
        return f"{words[0]} has no action {words[1]}"
    wrong = [flag for flag in _FLAG.findall(text) if flag not in all_flags(named)]
    return f"lacuna {named} has no {', '.join(wrong)}" if wrong else None


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES}), ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_and_keys_in_messages_exist(folder):
    for path in (path for path in SOURCES if path.parent == folder):
        for line, text in messages(path):
            where = f"{path.relative_to(ROOT)}:{line}"
            for command in _ADVISED.findall(text):
                assert not advised_wrongly(command), f"{where}: {advised_wrongly(command)}"
            for section, rest in _KEY.findall(text):
                if " " in text and f"{section}.{rest}" not in _FILES:  # prose, not an identifier
                    assert key_exists(section, rest), f"{where}: no key {section}.{rest}"


def owners() -> dict[str, str]:
    """Module or package of tools/ → its command."""
    return {module: name for name, (module, _) in COMMANDS.items()}


@pytest.mark.parametrize("module", sorted({path.relative_to(ROOT / "tools").parts[0].removesuffix(".py")
                                           for path in SOURCES if path.is_relative_to(ROOT / "tools")} & owners().keys()
                                          - {"bench"}))
def test_flags_in_a_commands_own_messages_exist(module):
    """Bare flags, without the command: those of the command itself, or of one that the same message names."""
    command = owners()[module]
    for path in SOURCES:
        if path.is_relative_to(ROOT / "tools") and path.relative_to(ROOT / "tools").parts[0].removesuffix(
                ".py") == module:
            for line, text in messages(path):
                if " " not in text.strip() or any(other in text for other in _OTHERS):
                    continue
                legal = all_flags(command).union(*(all_flags(word.split()[0]) for word in _ADVISED.findall(text)
                                                   if word.split()[0] in COMMANDS))
                unknown = [flag for flag in _FLAG.findall(_ADVISED.sub("", text)) if flag not in legal]
                assert not unknown, f"{path.relative_to(ROOT)}:{line} names {unknown}, not of `lacuna {command}`"
