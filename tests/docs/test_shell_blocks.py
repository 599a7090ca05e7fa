"""Proves that the shell blocks of README and docs work: some are run as they stand, all others name what exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lacuna.basics.places import CONFIGS
from lacuna.tools.cli import COMMANDS, parse
from lacuna.trainer.config.files import load_config
from tests.helpers.launching import ROOT, environment
from tests.helpers.pictures import write_pictures

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MEASUREMENTS = {"results.md", "scale.md", "gpu.md", "faults.md"}  # they take hours: only what they name is checked
_BLOCK = re.compile(r"(?:<!-- (run|not run)(?:: ([^>]+?))? -->\n)?```sh\n(.*?)```", re.DOTALL)


def blocks(path: Path) -> list[tuple[str, str, str]]:
    """(run or not run, name or reason, text)"""
    return _BLOCK.findall(path.read_text(encoding="utf-8"))


def commands(text: str) -> list[list[str]]:
    """Words of every lacuna command of a block, without remarks."""
    lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
    found = []
    for line in lines:
        for part in re.split(r"&&|\|", line.partition("  #")[0]):
            words = shlex.split(part, comments=True) if part.strip().startswith("lacuna ") else []
            found += [words[1:]] if words else []
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_commands_are_legal(path):
    """Every option exists; what ships is loaded with the changes that are given beside it."""
    for _, _, text in blocks(path):
        for words in commands(text):
            if words[0].startswith("--") or "--help" in words or "…" in " ".join(words):
                continue
            assert words[0] in COMMANDS, f"{path.name}: no command {words[0]}"
            args = parse(words)[1]
            config = getattr(args, "config", None)
            if config is not None and config not in ("my.yaml", "CONFIG"):
                load_config(config, [o for o in args.overrides if "…" not in o])


@pytest.mark.parametrize("path", [path for path in PAGES if path.name not in MEASUREMENTS], ids=lambda p: p.name)
def test_blocks_are_run_or_say_why_not(path):
    for kind, about, text in blocks(path):
        assert kind, f"{path.name}: neither <!-- run: … --> nor <!-- not run: why --> before\n{text}"
        assert about, f"{path.name}: say why it is not run, or what it needs"


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """Photos, and a config by the name of the one that ships: the same with a small model, for an epoch."""
    folder = tmp_path_factory.mktemp("desk")
    names = [f"{kind}/{number}.jpg" for kind in ("cat", "dog", "bus") for number in range(12)]
    write_pictures(folder / "photos", names)
    small = {"base": os.path.join(CONFIGS, "own_images.yaml"), "train": {"log_every": 1},
             "data": {"image_size": 32, "streams": 4}, "model": {"backbone": "lacuna:tiny", "weights": "none"}}
    body = load_config("own_images", [])
    phases = [phase.model_dump(mode="json") | {"epochs": 1, "batch": 8} for phase in body.phases]
    (folder / "own_images").write_text(yaml.safe_dump({**small, "phases": phases}))
    return folder


@pytest.mark.parametrize("path", [ROOT / "README.md", pytest.param(ROOT / "docs/tutorials/own_images.md",
                                                                   marks=pytest.mark.long)], ids=lambda p: p.name)
def test_own_images_as_pasted(path, desk):
    """All blocks of the page that are marked as run, one after another, in one shell."""
    text = "".join(text for kind, about, text in blocks(path) if (kind, about) == ("run", "own_images"))
    assert "lacuna train own_images" in text
    folder = desk / f"as in {path.name}"
    folder.mkdir()
    for name in ("photos", "own_images"):
        (folder / name).symlink_to(desk / name)
    variables = environment(PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    done = subprocess.run(["bash", "-e", "-c", text], cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "model" / "labels.json").exists()
    assert "cat/0.jpg" in done.stdout
