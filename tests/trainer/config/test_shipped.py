"""Everything that ships resolves to a config whose method accepts its settings, under a run name of its own, and says
its command, its hardware and the number to reach."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lacuna.basics.places import CONFIGS
from lacuna.trainer.config.files import load_config, read_table, shipped
from lacuna.trainer.config.reported import reported
from lacuna.trainer.config.validation import validated
from lacuna.trainer.methods import METHODS, build_method, example
from lacuna.trainer.methods.base import Task

TABLES = {name: table for name in shipped() if (table := read_table(name))}
BASES = [name for name in shipped() if name.startswith("base/")]
OWN = [name for name in shipped() if name not in TABLES and name not in BASES]
SOURCES = {name: [f"{name}:{row}" for row in TABLES[name].rows] for name in TABLES} | {name: [name] for name in OWN}


@pytest.mark.parametrize("name", SOURCES)
def test_configs_are_accepted(name):
    for source in SOURCES[name]:
        config = load_config(source, [])
        assert config.name == source.partition(":")[2] or name in OWN
        assert all(phase.batch % config.data.streams == 0 for phase in config.phases), source
        method = config.method["name"]
        counts = np.full(20, 10)
        needs = example(method).needs()
        full = needs.full_labels
        if needs.neighbors:  # a folder of the training data, which is not here
            validated(METHODS[method].settings_type, config.method, source)
        else:
            build_method(config.method, Task(20, 100, counts, counts, full, grid=7, expected_positives=2.0, width=8))
        assert full == (config.data.train.labels == "labels" and method.startswith("bce")), source


def test_names_are_those_of_one_run_each():
    names = Counter([row for table in TABLES.values() for row in table.rows] + [load_config(n, []).name for n in OWN])
    assert [name for name, count in names.items() if count > 1] == []
    assert len(names) > 300


@pytest.mark.parametrize("name", TABLES)
def test_heads_of_tables(name):
    about = TABLES[name].about
    assert about.splitlines()[0].endswith("."), "the line that `lacuna configs` shows"
    assert about.count("Hardware: ") == 1
    commands = re.findall(r"lacuna (?:train|csl) (\S+)", about)
    assert commands
    assert set(commands) <= set(SOURCES[name])
    number = any("reported" in row for row in TABLES[name].rows.values())
    assert number == bool(TABLES[name].source)
    assert number or "No test mAP" in about


@pytest.mark.parametrize("name", BASES + OWN)
def test_heads_of_files(name):
    head = Path(CONFIGS, f"{name}.yaml").read_text().split("\nname:")[0]
    assert head.splitlines()[0].endswith("."), "the line that `lacuna configs` shows"
    assert "lacuna " in head or "# Data: as in" in head
    assert name in BASES or "mAP" in head


def test_reported_numbers_come_by_method_and_dataset():
    found = {entry.config: entry for entry in reported()}
    linear = found["cole:coco14_an_linear"]
    assert (linear.method, linear.dataset, linear.numbers) == ("an", "coco14", 62.3)
    assert "Cole et al." in linear.source
    assert found["csl:openimages_v6_selective"].numbers == {"mAP(C)": 86.72, "mAP(O)": 93.57}
    assert found["verelst:coco14_an_cl"].numbers == {"validation mAP": 70.1}
    assert found["mime:voc12_mime"].method == "mime", "from the table's defaults"
    assert "soft_exposure:cifar100_se" not in found, "no number is published"
    assert {entry.method for entry in found.values()} <= METHODS.keys()
