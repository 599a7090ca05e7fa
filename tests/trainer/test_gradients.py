"""Gradients that are averaged while the backward runs equal DeepSpeed's own exchange bit for bit; clipping equals its
formula."""

from __future__ import annotations

import torch

from lacuna.trainer.gradients import clip
from tests.helpers import launching

RANKS = 3  # with two, any order of a sum has the same bits
SCRIPT = """
import torch
from lacuna.trainer import engine as engines, world
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.engine import build_engine
from lacuna.trainer.models.classifier import build_model

joined = world.start(120)
config = parse_config({"name": "x", "data": {"train": {"url": "unused"}, "image_size": 16},
                       "model": {"backbone": "lacuna:tiny"}, "train": {"micro_batch": 2},
                       "phases": [{"name": "a", "epochs": 1, "batch": 12, "lr": 0.1}]}, "x")
engines._ON_CPU = 20_000  # several buckets
engines.shared_slots = lambda *_: None  # as if on several machines
models = [build_model(config.model, config.data, 3, 0) for _ in range(2)]
models[1].load_state_dict(models[0].state_dict())
for model in models:
    torch.manual_seed(5)
    model.extra = torch.nn.Linear(4, 4)  # without a gradient in the last step
ours, theirs = (build_engine(model, config, config.phases[0], joined)[0] for model in models)
exchange = ours.allreduce_gradients.__self__
assert len(exchange.buckets) >= 3
theirs.allreduce_gradients.__self__.close()
theirs.allreduce_gradients = lambda: type(theirs).allreduce_gradients(theirs, bucket_size=20_000)
under_way = []
models[0].backbone[0].weight.register_post_accumulate_grad_hook(lambda _: under_way.append(len(exchange.sent)))
for step in range(3):
    for piece in range(2):
        torch.manual_seed(100 * joined.rank + 10 * step + piece)
        images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
        gradients = []
        for engine in (ours, theirs):
            loss = engine(images)[0].square().mean()
            engine.backward(loss + engine.module.extra(torch.ones(4)).sum() if step < 2 else loss)
            gradients.append([p.grad.clone() for p in engine.module.parameters() if p.grad is not None])
            engine.step()
        assert all(map(torch.equal, *gradients)), (step, piece)
        assert piece == 0 or len(gradients[0]) == len(list(models[0].parameters()))
assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
assert under_way[0::2] == [0, 0, 0] and min(under_way[1:4:2]) >= 2, under_way
ours.destroy()
assert not any(p._post_accumulate_grad_hooks for p in list(models[0].parameters())[2:])
print("equal on rank", joined.rank)
"""


def test_the_same_bits_as_after_the_backward(tmp_path):
    """Two micro-batches per step: only the second one sends, its last layers before the first ones are known."""
    path = tmp_path / "exchange.py"
    path.write_text(SCRIPT)
    launch = launching.launches.Launch(launching.command(RANKS, script=str(path)), str(tmp_path / "out"),
                                       launching.environment(), str(tmp_path))
    assert launch.wait(600) == 0, launch.text()[-3000:]
    assert launch.text().count("equal on rank") == RANKS


def test_clip():
    torch.manual_seed(0)
    for most in (0.1, 1e6):
        parameters = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((5, 7), (3,), (2, 2))]
        for parameter in parameters[:2]:
            parameter.grad = torch.randn(parameter.shape)
        before = [p.grad.clone() for p in parameters[:2]]
        norm = sum(g.double().square().sum() for g in before) ** 0.5
        clip(parameters, most)
        for parameter, gradient in zip(parameters, before, strict=False):
            wanted = gradient * min(1.0, most / float(norm))
            torch.testing.assert_close(parameter.grad, wanted)
        assert parameters[2].grad is None
