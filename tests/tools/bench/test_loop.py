"""Proves that `lacuna bench loop` runs both sides of every case, that its ratios are those of its times, and that the
plain side's ROLE is the method's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lacuna.data_pipelines.labels import POSITIVE, UNKNOWN
from lacuna.tools.bench.loop import _K, role
from lacuna.tools.cli import main
from lacuna.trainer.methods.base import Outputs
from tests.helpers.benches import bench, is_quotient
from tests.helpers.method_steps import Rows, method_of, take_step, total

CASES = {"step_cpu_vs_plain_16", "step_cpu_vs_plain_256", "role_vs_plain_16"}


def test_ratios_are_those_of_the_times():
    report, _ = bench("loop", "--steps", "3", "--turns", "1")
    assert set(report["ratios"]) == set(report["process"]) == set(report["main_thread_ms"]) == CASES
    for name, (ours, plain) in report["main_thread_ms"].items():
        assert is_quotient(report["ratios"][name], ours, plain, 3)
        assert report["process"][name] > 0


def test_plain_role_is_the_methods():
    rng = np.random.default_rng(0)
    labels = np.full((7, 80), UNKNOWN, np.int8)
    labels[np.arange(7), rng.integers(0, 80, 7)] = POSITIVE
    logits, phi = (torch.from_numpy(rng.normal(0, 2, labels.shape).astype(np.float32)) for _ in range(2))
    method = method_of("role", labels)
    method.k = _K
    terms = take_step(method, Outputs(logits), labels, Rows(method, labels, {"phi": phi.numpy()}))
    found = role(logits, phi, torch.from_numpy(labels == POSITIVE).float())
    assert float(found) == pytest.approx(float(total(terms)), rel=1e-3)  # φ is stored as halves


def test_bad_options_are_named(capsys):
    assert main(["bench", "loop", "--turns", "-3"]) == 2
    assert "--turns -3" in capsys.readouterr().err
