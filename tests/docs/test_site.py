"""Proves that the reference is complete, that the site builds without a warning, and that the examples run."""

from __future__ import annotations

import configparser
import fnmatch
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import lacuna
from lacuna.tools.cli import COMMANDS
from lacuna.trainer.config.sections import flat
from lacuna.trainer.methods import METHODS
from tests.helpers.launching import ROOT, environment


@pytest.fixture(scope="module")
def reference():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_setting_is_explained(reference):
    page = reference.settings_page()
    config = lacuna.load_config("demo", "data.fully_labelled.url=x")
    for key in flat(config.model_dump(mode="json")):
        key = re.sub(r"^(method|.*\.(scale|color_jitter|trainable|loggers))\..*", r"\1", key)
        key = re.sub(r"^phases\.\d+", "phases.N", key)
        assert f"| `{key}` |" in page, key
    assert "| `model.head_bias` | `prior` | `prior` or `zero` or `default` | Where the head&#x27;s" in page.replace(
        "head's", "head&#x27;s")
    assert "| `train.loggers` | `[tensorboard]` | list of `tensorboard` or `wandb` or `mlflow` |" in page
    assert "| `phases.N.epochs` | **required** | whole number, > 0 |" in page


def test_every_command_method_and_public_name_is_there(reference):
    commands, methods, python = reference.commands_page(), reference.methods_page(), reference.python_page()
    assert all(f"\n## {name}\n" in commands for name in COMMANDS)
    assert "### shards make coco\n" in commands
    assert all(f"\n## `{name}`\n" in methods for name in METHODS)
    assert all(f"## `lacuna.{name}`" in python for name in lacuna.__all__)


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="pip install 'lacuna-trainer[docs]'")
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
                          cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    for name in ("index.html", "reference/settings.html", "tutorials/clusters.html", "heatmaps.png", "sample_path.svg"):
        assert (tmp_path / name).exists(), name
    scripts = re.findall(r'<script src="([^"]+)"', (tmp_path / "architecture.html").read_text(encoding="utf-8"))
    foreign = {script for script in scripts if "//" in script}
    assert foreign <= {"https://unpkg.com/iframe-worker/shim"}, "only the search may want a connection"


def test_links_of_the_readme_lead_somewhere():
    for name in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", (ROOT / name).read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{name} links to {target}"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("examples")


def run_example(name: str, place: Path, *words: object) -> str:
    done = subprocess.run([sys.executable, str(ROOT / "docs" / "examples" / name), *map(str, words)], cwd=place,
                          env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_examples_run(single_shards, place):
    assert "mAP: " in run_example("map_of_your_scores.py", place)
    train = single_shards / "train"
    assert "labels torch.Size([32, 10])" in run_example("torch_dataset.py", place, train, "single")
    assert "drawn in loss.svg" in run_example("train_and_plot.py", place, train, "loss.svg")
    assert (place / "loss.svg").read_text().count(",") > 10
    assert "trained: " in run_example("own_loss.py", place, train)


def test_the_state_example_reads_a_run(single_shards, place):
    config = lacuna.load_config(
        "demo", "name=stated", f"run_folder={place}", f"data.train.url={single_shards}/train", "data.val=null",
        "data.test=null", "method={name: en}", "model.expected_positives=2", "phases.0.epochs=1", "phases.1.epochs=1")
    lacuna.train(config)
    out = run_example("state_as_tables.py", place, config.folder)
    assert "snapshots: " in out
    assert "float32" in out


def test_every_example_is_run_here():
    text = Path(__file__).read_text(encoding="utf-8")
    for path in (ROOT / "docs" / "examples").glob("*.py"):
        assert f'"{path.name}"' in text, path.name


def test_manifests_are_well_formed():
    """No cluster and no container engine here: the files are read as their programs would."""
    documents = list(yaml.safe_load_all((ROOT / "docs/examples/kubernetes.yaml").read_text()))
    job = next(d for d in documents if d["kind"] == "Job")["spec"]
    assert job["completions"] == job["parallelism"] == 2
    command = job["template"]["spec"]["containers"][0]["args"][0]
    assert subprocess.run(["bash", "-n", "-c", command]).returncode == 0
    row = re.search(r"--config (\S+)", command)
    assert lacuna.load_config(row[1]).name
    lines = re.sub(r"\\\n\s*", "", (ROOT / "docs/examples/Dockerfile").read_text()).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    legal = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD"}
    assert {step[0] for step in steps} <= legal
    assert steps[0] == ["ARG", "BASE=ubuntu:24.04"]
    for name, text in steps:
        if name == "RUN":
            assert subprocess.run(["bash", "-n", "-c", text]).returncode == 0, text
    assert [name for name, _ in steps].index("USER") < [name for name, _ in steps].index("ENTRYPOINT")


def test_the_image_installs_what_is_there_and_copies_nothing_else():
    text = (ROOT / "docs/examples/Dockerfile").read_text()
    named = re.search(r"pip install .*-c (\S+) '\.\[(\w+)\]'", text)
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    assert (ROOT / named[1]).exists()
    assert named[2] in setup["options.extras_require"]
    assert "\nCOPY . .\n" in text
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tops = {name.split("/")[0] for name in listed.split("\n") if name}
    assert not [pattern for pattern in ignored if fnmatch.filter(tops, pattern)], "sources are left out"
    made = (".venv", ".venv-moto", ".venv-loggers", "build", "runs", "shards", "demo")
    assert all(any(fnmatch.fnmatch(name, pattern) for pattern in ignored) for name in made)
