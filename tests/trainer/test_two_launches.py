"""Proves that a launch which another one replaced ends with code 2 and leaves no trace in what the run has recorded."""

from __future__ import annotations

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lacuna.basics import fence
from lacuna.basics.fence import Fence, Hold, LostLaunch
from lacuna.tools.launches import read_trace, timeless
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.run_folder import RunFolder
from lacuna.trainer.run_log import RunLog, metric_lines
from lacuna.trainer.world import World
from tests.helpers.launching import Launch, assert_equal_weights, metrics, trace
from tests.helpers.run_configs import config

BODY = {"name": "run", "data": {"train": {"url": "a"}}, "method": {"name": "an"},
        "phases": [{"name": "p", "epochs": 1, "batch": 8, "lr": 0.1}]}


def opened(tmp_path, at: int) -> RunLog:
    """What a launch does before it trains."""
    world = World(torch.device("cpu"))
    body = parse_config({**BODY, "run_folder": str(tmp_path)}, "test")
    log = RunLog(body, RunFolder(body.folder, world), True)
    barrier = Fence(str(tmp_path / "run" / "checkpoints" / "log"))
    log.rewind(at, Hold(barrier, barrier.begin()))
    return log


def train(log: RunLog, steps: range) -> None:
    for step in steps:
        log.write("train", step, {"loss": 1 / step})
        log.write_bad_samples([{"step": step - 1, "key": key} for key in "ab"])
        log.trace(step, [step], [0])


def recorded(folder) -> tuple:
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    bad = [json.loads(line) for line in (folder / "bad_samples.jsonl").read_text().splitlines()]
    return (timeless(metrics(folder)), [(line["step"], line["key"]) for line in bad], read_trace(str(folder)),
            [(event.step, event.value) for event in board.Scalars("train/loss")])


def test_copies_that_a_killed_launch_left_half_written_are_removed(tmp_path):
    """They were taken for traces of ranks that are no more, and their samples counted twice."""
    killed = opened(tmp_path, 0)
    train(killed, range(1, 6))
    killed.close()
    run = tmp_path / "run"
    trace_file = (run / "trace" / "rank-0.jsonl").read_text()
    left = [run / "metrics.jsonl.1a2b3c4d.partial", *(run / "trace" / f"rank-{rank}.jsonl.1a2b3c4d.partial"
                                                      for rank in (0, 3))]
    for path in left:
        path.write_text(trace_file)
    before = read_trace(str(run))
    opened(tmp_path, 5).close()
    assert not any(path.exists() for path in left)
    assert read_trace(str(run)) == before
    assert all(len(samples) == 1 for samples in before.values())


def test_what_a_lost_launch_wrote_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(fence, "_GLANCE_SECONDS", 3600)  # so that the old launch does not notice
    undisturbed = opened(tmp_path / "calm", 0)
    train(undisturbed, range(1, 21))
    undisturbed.close()
    old = opened(tmp_path, 0)
    train(old, range(1, 16))
    new = opened(tmp_path, 10)  # the newest checkpoint
    train(old, range(16, 18))
    train(new, range(11, 14))
    train(old, range(18, 21))
    lines = metric_lines((tmp_path / "run" / "metrics.jsonl").read_bytes())
    assert [line["step"] for line in lines if line["launch"] == 2] == [11, 12, 13]
    train(new, range(14, 21))
    for logger in old.loggers:
        logger.close(whole=False)
    new.close()
    assert recorded(tmp_path / "run") == recorded(tmp_path / "calm" / "run")
    assert {line["launch"] for line in metrics(tmp_path / "run")} == {1, 2}


def test_a_replaced_launch_notices_before_it_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(fence, "_GLANCE_SECONDS", 0)
    old = opened(tmp_path, 0)
    train(old, range(1, 4))
    new = opened(tmp_path, 3)
    with pytest.raises(LostLaunch, match="launch 2 of this run has begun, so launch 1 ends here"):
        old.write("train", 4, {"loss": 1.0})
    with pytest.raises(LostLaunch):
        old.trace(4, [0], [0])
    with pytest.raises(LostLaunch):
        old.check()
    train(new, range(4, 6))
    new.close()
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5]


@pytest.mark.long
@pytest.mark.parametrize("method", [None, "role"])  # without state and with it: where the fence is differs
def test_two_launches_at_once(single_shards, tmp_path, method):
    body = config(single_shards, "run")
    if method:
        body["data"]["train"]["labels"], body["train"]["ema_decay"] = "single", 0.0
        body["method"] = {"name": "role", "lr": 0.03}
    body["phases"] = [{**body["phases"][1], "epochs": 60}]
    body["train"] |= {"checkpoint_every": "40st", "eval_every": 20}
    calm = Launch({**body, "name": "calm"}, tmp_path, 1)
    calm.ok()
    old = Launch(body, tmp_path, 1)
    old.wait_for_step(45)
    new = Launch(body, tmp_path, 1)
    assert old.wait() == 2, old.text()[-3000:]
    assert "launch 2 of this run has begun, so launch 1 ends here" in old.text()
    assert "Traceback" not in old.text()
    new.ok()
    assert_equal_weights(new.folder, calm.folder)
    assert timeless(metrics(new.folder)) == timeless(metrics(calm.folder))
    assert trace(new.folder) == trace(calm.folder)
