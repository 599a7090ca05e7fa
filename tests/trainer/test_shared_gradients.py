"""Gradients averaged through shared memory equal the sum in the order of ranks bit for bit, with two ranks also what
sockets would give; where one rank cannot share memory, none does; the death of a rank is noticed."""

from __future__ import annotations

import signal

import pytest

from tests.helpers import launching

START = """
import os
import torch, torch.distributed as dist
from lacuna.trainer import engine as engines, shared_gradients as shared, world
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.models.classifier import build_model

joined = world.start(120)
config = parse_config({"name": "x", "data": {"train": {"url": "unused"}, "image_size": 16},
                       "model": {"backbone": "lacuna:tiny"}, "train": {"micro_batch": 2, "channels_last": True},
                       "phases": [{"name": "a", "epochs": 1, "batch": 4 * joined.size, "lr": 0.1}]}, "x")
model = build_model(config.model, config.data, 3, 0)
model.extra, model.empty = torch.nn.Linear(4, 4), torch.nn.Linear(4, 0)
engine = engines.build_engine(model, config, config.phases[0], joined)[0]
"""

SUMS = START + """
exchange, finish = engine.allreduce_gradients.__self__, engine.allreduce_gradients
assert isinstance(exchange, shared.SharedExchange)
learning = engines.sendable(engine.module)
assert any(not p.is_contiguous() for p in learning)
own = []

def oracle():
    if engine.is_gradient_accumulation_boundary():
        own[:] = [torch.zeros(p.shape) if p.grad is None else p.grad.clone() for p in learning]
    finish()

engine.allreduce_gradients = oracle
for step in range(4):
    for piece in range(2):
        torch.manual_seed(100 * joined.rank + 10 * step + piece)
        loss = engine(torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8))[0].square().mean()
        alone = step == 2 and joined.rank  # only some ranks have a gradient of everything, or none of them has
        engine.backward(loss if step == 3 or alone else loss + model.extra(torch.ones(4)).sum())
        if piece:
            for parameter, mine in zip(learning, own, strict=True):
                every = joined.all_gather(mine)
                total = sum(every[1:], every[0])
                assert torch.equal(parameter.grad, total * (1.0 / joined.size)), (step, parameter.shape)
                assert parameter.grad.stride() == parameter.stride()
                if joined.size == 2:
                    dist.all_reduce(mine := mine.contiguous())
                    assert torch.equal(parameter.grad, mine * 0.5)
        engine.step()
weights = torch.cat([p.detach().flatten() for p in model.parameters()])
assert torch.equal(joined.all_gather(weights), weights.expand(joined.size, -1))
engine.destroy()
assert not any(p._post_accumulate_grad_hooks for p in learning)
print("equal on rank", joined.rank)
"""

WITHOUT = START + """
def refused(name, what):
    before = getattr(shared, name)
    if joined.rank == 1:
        setattr(shared, name, what)
    assert shared.shared_slots(joined, 100) is None, name
    setattr(shared, name, before)

refused("_reserve", lambda size: None)
refused("machine", lambda: ("another", "one"))
refused("_open_all", lambda places, count: None)
handles = len(os.listdir("/proc/self/fd"))
assert [len(slot) for slot in shared.shared_slots(joined, 100)] == [100] * joined.size
assert len(os.listdir("/proc/self/fd")) == handles
engines.shared_slots = lambda world, count: None
assert isinstance(engines._exchange(engine, joined, 100), engines.Exchange)
print("refused on rank", joined.rank)
"""

KILLED = START + """
import signal
for step in range(3):
    loss = engine(torch.zeros((2, 3, 16, 16), dtype=torch.uint8))[0].square().mean()
    if step == 2 and joined.rank == 1:  # amid a backward, its slot half written
        model.backbone[0].weight.register_post_accumulate_grad_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    try:
        for _ in range(2):
            engine.backward(loss, retain_graph=True)
            engine.step()
    except RuntimeError as error:
        print("rank", joined.rank, "noticed:", world.lost_peer(error), flush=True)
        os._exit(3)
"""


def _launch(folder, script: str, ranks: int) -> launching.launches.Launch:
    path = folder / "script.py"
    path.write_text(script)
    return launching.launches.Launch(launching.command(ranks, script=str(path)), str(folder / "out"),
                                     launching.environment(), str(folder))


@pytest.mark.parametrize(("script", "ranks", "said"), [(SUMS, 2, "equal on rank"), (SUMS, 3, "equal on rank"),
                                                       (WITHOUT, 2, "refused on rank")])
def test_ranks(tmp_path, script, ranks, said):
    launch = _launch(tmp_path, script, ranks)
    assert launch.wait(600) == 0, launch.text()[-3000:]
    assert launch.text().count(said) == ranks


def test_a_killed_rank_is_noticed(tmp_path):
    launch = _launch(tmp_path, KILLED, 2)
    assert launch.wait(600) != 0
    assert signal.SIGKILL.name in launch.text() or "noticed: the connection to another rank" in launch.text()
