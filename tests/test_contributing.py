"""Proves that the worked example of CONTRIBUTING.md is a method that trains, and that the documents name real files."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import yaml

from lacuna import state_store
from tests.helpers.launching import environment, metrics

ROOT = Path(__file__).resolve().parents[1]
_REGISTER = "import sys, patient\nfrom lacuna.trainer.methods import METHODS\nMETHODS['patient'] = patient.Patient\n"
_TRAIN = _REGISTER + "from lacuna.trainer.run import main\nsys.exit(main(sys.argv[1:]))"
_DESCRIBE = _REGISTER + "from lacuna.tools.cli import main\nsys.exit(main(['methods', 'patient']))"


def example() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"<!-- example: method -->\n```python\n(.*?)```", text, re.DOTALL)
    return block


def test_the_example_is_short_and_clean():
    assert sum(bool(line.strip()) for line in example().splitlines()) <= 30
    ruff = [str(Path(sys.executable).parent / "ruff"), "check", "--stdin-filename", "trainer/methods/patient.py", "-"]
    done = subprocess.run(ruff, input=example(), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_the_example_trains(digit_shards, tmp_path):
    """Registered as the text says: described by `lacuna methods`, trained for two epochs, its field written."""
    (tmp_path / "patient.py").write_text(example())
    config = {"name": "run", "run_folder": str(tmp_path), "model": {"backbone": "lacuna:tiny"},
              "data": {"train": {"url": str(digit_shards / "train")}, "image_size": 32, "streams": 4,
                       "normalize": "centered"},
              "method": {"name": "patient", "momentum": 0.5}, "train": {"log_every": 1},
              "phases": [{"name": "only", "epochs": 2, "batch": 64, "lr": 3e-3}]}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    paths = environment(PYTHONPATH=f"{tmp_path}:{ROOT / 'src'}")

    def python(code: str, *arguments: str) -> str:
        done = subprocess.run([sys.executable, "-c", code, *arguments], env=paths, capture_output=True, text=True,
                              timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "trusted less" in python(_DESCRIBE)
    python(_TRAIN, "--config", str(tmp_path / "config.yaml"))
    losses = [line["loss"] for line in metrics(tmp_path / "run", "train")]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    store = state_store.open(str(tmp_path / "run" / "state"))
    scores = store.reader(store.snapshots()[-1].name).read_shard("score", 0)
    assert scores.min() < scores.max()


def test_documents_name_files_that_exist():
    for name in ("CONTRIBUTING.md", "docs/architecture.md", "README.md"):
        text = (ROOT / name).read_text()
        links = re.findall(r"\]\((?!http|#)([^)#]+)\)", text)
        paths = re.findall(r"`((?:data_pipelines|state_store|trainer|tools|configs|tests)/[\w/.-]*\w)`", text)
        for path in [*(str((ROOT / name).parent / link) for link in links), *(str(ROOT / p) for p in paths)]:
            if not path.endswith("patient.py"):  # the reader's own file
                assert Path(path).exists(), f"{name}: {path}"
