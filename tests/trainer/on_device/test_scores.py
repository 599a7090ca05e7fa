"""Scores that wait in blocks on a device arrive in order and complete, with one read-back per block; the weight EMA by
foreach operations equals the one tensor by tensor."""

from __future__ import annotations

import numpy as np
import torch

from lacuna.trainer.phase import update_ema
from tests.helpers import launching


def test_blocks_on_the_device(tmp_path):
    path = tmp_path / "blocks.py"
    path.write_text("""
import numpy as np
import torch
from lacuna.trainer.metrics.collector import ScoreCollector
from lacuna.trainer.on_device.scores import ScoreBlock
from tests.helpers import pretended_device as pretended
device, rng = pretended.register(), np.random.default_rng(0)
direct, collector = ScoreCollector(7), ScoreCollector(7)
block = ScoreBlock(collector, most=100 * 7 * 4)
with pretended.OnDevice(), pretended.RECORD.step():
    for batch in range(9):
        count = 30 + batch
        scores = torch.from_numpy(rng.random((count, 7)).astype(np.float32))
        labels = torch.from_numpy(rng.integers(0, 2, (count, 7)).astype(np.int8))
        ordinals = np.arange(count) + 1000 * batch
        direct.add(scores, labels, ordinals=ordinals)
        block.add(scores.to(device, non_blocking=True), labels, ordinals)
    block.flush()
waits = [wait.what for wait in pretended.RECORD.waits]
assert waits == ["blocking copy to the host"] * 3, waits
one, two = direct.result(), collector.result()
assert one.summary() == two.summary() and collector.count == direct.count == sum(range(30, 39))
""")
    launch = launching.launches.Launch(launching.command(1, script=str(path)), str(tmp_path / "out"),
                                       launching.environment(), str(tmp_path))
    assert launch.wait(600) == 0, launch.text()[-3000:]


def test_weight_average():
    torch.manual_seed(0)
    model, ema = (torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7)) for _ in range(2))
    model(torch.randn(9, 5))
    expected = [a.detach().clone().lerp_(w.detach(), 1 - 0.9) for a, w in zip(ema.parameters(), model.parameters(),
                                                                             strict=True)]
    update_ema(ema, model, 0.9)
    for found, wanted in zip(ema.parameters(), expected, strict=True):
        np.testing.assert_array_equal(found.detach().numpy(), wanted.numpy())
    for found, wanted in zip(ema.buffers(), model.buffers(), strict=True):
        assert torch.equal(found, wanted)
