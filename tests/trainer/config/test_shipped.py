"""Every shipped config parses, its method accepts its settings, its head says the command and the number to reach."""

from pathlib import Path

import numpy as np
import pytest

from lacuna.trainer.config.files import load_config
from lacuna.trainer.config.validation import validated
from lacuna.trainer.methods import METHODS, build_method
from lacuna.trainer.methods.base import Task

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*.yaml") if p.parent.name != "base")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: str(p.relative_to(ROOT / "configs")))
def test_config(path):
    config = load_config(str(path), [])
    assert all(phase.batch % config.data.streams == 0 for phase in config.phases)
    name = config.method["name"]
    counts = np.full(20, 10)
    full = METHODS[name].needs_full_labels
    if METHODS[name].needs_neighbors:  # a folder of the training data, which is not here
        validated(METHODS[name].settings_type, config.method, str(path))
    else:
        build_method(config.method, Task(20, 100, counts, counts, full, grid=7, full_positives=2.0, width=8))
    assert full == (config.data.train.labels == "labels" and name.startswith("bce"))
    head = path.read_text().split("\nname:")[0]
    assert str(path.relative_to(ROOT)) in head or "lacuna demo" in head
    assert "mAP" in head


def test_there_are_configs():
    assert len(CONFIGS) > 100
