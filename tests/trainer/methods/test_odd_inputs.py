"""Methods with state, passes, tables or views stay finite: bf16 logits of ±80, rows of one kind, L = 1, no rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.trainer.methods.base import Outputs
from tests.helpers.method_steps import GRID, WIDTH, Rows, method_of, take_step, total

SHAPES = ((1, 1), (1, 4), (3, 1), (5, 7), (0, 4))
# name → settings; `phase` says where the method does most.
CASES = {
    "ll_cp": {"delta_percent": 20}, "em_apl": {"warmup_epochs": 1}, "mime": {}, "crisp": {}, "ignore": {}, "vlpl": {},
    "gpr": {"top_k": 2}, "aevlp": {}, "scpnet": {}, "ccd": {}, "lac": {"contrast_phase": 0, "queue": 6},
    "scob": {},
}


def prepared(name, labels):
    method = method_of(name, labels, **CASES[name])
    if name == "crisp":
        method.priors = torch.full(labels.shape[1:], 0.3)
    if name == "ccd":
        method.bias = torch.full(labels.shape[1:], 0.2)
    return method


@pytest.mark.parametrize("name", CASES)
def test_finite(name):
    for shape in SHAPES:
        for label in (UNKNOWN, POSITIVE, NEGATIVE):
            labels = np.full(shape, label, np.int8)
            method = prepared(name, labels)
            tables = {f: np.full((max(1, shape[0]), shape[1]), score, np.float16)
                      for f, score in zip(method.needs().scores, (0.9, 1.0, 0.0), strict=False)}
            rows = Rows(method, labels, tables)
            for size in (80.0, -80.0, 0.0):
                def forward(images, size=size, shape=shape):
                    maps = torch.full((len(images), shape[1], GRID, GRID), -size)
                    return Outputs(maps.mean((2, 3)), maps, torch.full((len(images), WIDTH, GRID, GRID), size))

                logits = torch.full(shape, size, dtype=torch.bfloat16, requires_grad=True)
                maps = logits.float()[:, :, None, None].expand(*shape, GRID, GRID)
                outputs = Outputs(logits.float(), maps, torch.full((shape[0], WIDTH, GRID, GRID), size))
                for epoch in (0, 1, 9):
                    loss = total(take_step(method, outputs, labels, rows, forward, epoch=epoch))
                    gradient, = torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)
                    where = (shape, label, size, epoch)
                    assert torch.isfinite(loss), where
                    assert gradient is None or torch.isfinite(gradient).all(), where
            for key, kept in method.state().items():
                assert torch.isfinite(kept.float()).all() or key == "surest_logit"  # −inf: a class without an image
