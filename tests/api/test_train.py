"""Proves that lacuna.train trains as the command does, twice in one process, and leaves that process as it was."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import yaml

import lacuna
from lacuna.tools.launches import command, timeless
from tests.helpers.launching import ROOT, Launch, assert_equal_weights, environment, metrics


def config(data: Path, folder: Path, name: str, **more) -> dict:
    return {"name": name, "run_folder": str(folder),
            "data": {**{split: {"url": str(data / split)} for split in ("train", "val", "test")}, "image_size": 32,
                     "normalize": "centered", "streams": 4, "augment": {"flip": False}},
            "model": {"backbone": "lacuna:tiny"}, "method": {"name": "an"},
            "phases": [{"name": "only", "epochs": 2, "batch": 32, "lr": 3e-3}], "train": {"log_every": 5}, **more}


def child(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT,
                          env=environment(**variables))


_TWICE = """
import logging, os, signal, sys, threading
import torch, torch.distributed as dist
import lacuna

mine = logging.NullHandler()
log = logging.getLogger("lacuna")
log.addHandler(mine)
signal.signal(signal.SIGTERM, handler := lambda *_: None)

def facts():
    return {"signals": [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)], "handlers": log.handlers[:],
            "level": log.level, "propagate": log.propagate, "draws": torch.get_rng_state().tolist(),
            "variables": {k: v for k, v in os.environ.items() if k in
                          ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")},
            "threads": torch.get_num_threads(), "group": dist.is_initialized()}

torch.manual_seed(7)
before = facts()
for path in sys.argv[1:]:
    results = lacuna.train(lacuna.load_config(path))
    after = facts()
    assert after == before, [(name, after[name], before[name]) for name in before if after[name] != before[name]]
    assert not results.stopped
    assert results.run.results == results
    print(results.test["map"], results.best_step, results.folder)
left = [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
assert not left, left
gloo = [task for task in os.listdir("/proc/self/task") if "gloo" in open(f"/proc/self/task/{task}/comm").read()]
assert len(gloo) <= 3, "process groups pile up: two of three threads each per run, and DeepSpeed keeps one under ZeRO"
"""


def test_two_runs_in_one_process_equal_those_of_the_command(single_shards, tmp_path):
    """A stateful method and a plain one, with ZeRO 0 and 1; nothing of the process has changed in between."""
    bodies = {}
    for side in ("here", "launched"):
        (tmp_path / side).mkdir()
        stateful = config(single_shards, tmp_path / side, "state", method={"name": "role"})
        stateful["data"]["train"]["labels"] = "single"
        zero = config(single_shards, tmp_path / side, "zero", train={"log_every": 5, "deepspeed": "zero1"})
        bodies[side] = [stateful, zero]
    for body in bodies["launched"]:
        Launch(body, tmp_path / "launched", 1).ok()
    paths = []
    for body in bodies["here"]:
        paths.append(str(tmp_path / "here" / f"{body['name']}.yaml"))
        Path(paths[-1]).write_text(yaml.safe_dump(body))
    done = child(_TWICE, *paths)
    assert done.returncode == 0, done.stderr[-4000:]
    for line, name in zip(done.stdout.strip().splitlines(), ("state", "zero"), strict=True):
        here, launched = tmp_path / "here" / name, tmp_path / "launched" / name
        assert_equal_weights(here, launched)
        assert timeless(metrics(here)) == timeless(metrics(launched))
        results = json.loads((launched / "results.json").read_text())
        assert json.loads((here / "results.json").read_text()) == results
        assert line.split() == [str(results["test"]["map"]), str(results["best_step"]), str(here)]


_THREAD = """
import signal, sys, threading
import lacuna

before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
seen, found = [], []

def work():
    found.append(lacuna.train(lacuna.load_config(sys.argv[1])))

thread = threading.Thread(target=work)
thread.start()
while thread.is_alive():
    seen.append([signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == before)
    thread.join(0.05)
assert all(seen) and len(seen) > 3, seen
print(found[0].test["rows"])
"""


def test_on_another_thread_signals_are_left_alone(single_shards, tmp_path):
    body = config(single_shards, tmp_path, "threaded")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(body))
    done = child(_THREAD, str(tmp_path / "c.yaml"))
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["60"]


_STOPPED = """
import os, signal, sys, threading, time
import lacuna

config = lacuna.load_config(sys.argv[1])
metrics = os.path.join(config.folder, "metrics.jsonl")

def ask():
    while not os.path.exists(metrics) or not os.path.getsize(metrics):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=ask, daemon=True).start()
first = lacuna.train(config)
assert first.stopped and not first.test and first.run.results is None, first
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
second = lacuna.train(config)
print(first.stopped, second.stopped, second.run.results == second)
"""


def test_ctrl_c_stops_after_a_checkpoint_and_the_same_call_resumes(single_shards, tmp_path):
    body = config(single_shards, tmp_path, "stopped", train={"log_every": 1})
    body["phases"][0]["epochs"] = 6
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(body))
    done = child(_STOPPED, str(tmp_path / "c.yaml"))
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["True", "False", "True"]
    whole = Launch({**body, "name": "whole"}, tmp_path, 1)
    whole.ok()
    assert_equal_weights(tmp_path / "stopped", whole.folder)


_FAILING = """
import logging, os, signal, sys, threading
import torch.distributed as dist
import lacuna

bad, good = sys.argv[1:]
for path in (bad, bad):
    try:
        lacuna.train(lacuna.load_config(path))
    except lacuna.UserError as error:
        print(error)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not dist.is_initialized() and "RANK" not in os.environ
    assert not logging.getLogger("lacuna").handlers
print(lacuna.train(lacuna.load_config(good)).stopped)
"""


def test_an_error_is_an_exception_and_training_goes_on_afterwards(single_shards, tmp_path):
    """Half of the training tars is gone: found in the middle of training, after the state's threads have begun."""
    good = config(single_shards, tmp_path, "good")
    bad = config(single_shards, tmp_path, "bad", method={"name": "role"})
    bad["data"]["train"] = {"url": str(tmp_path / "broken"), "labels": "single"}
    subprocess.run(["cp", "-r", str(single_shards / "train"), str(tmp_path / "broken")], check=True)
    for number in range(6, 13):
        (tmp_path / "broken" / f"shard-{number:05d}.tar").unlink()
    paths = []
    for body in (bad, good):
        paths.append(str(tmp_path / f"{body['name']}.yaml"))
        Path(paths[-1]).write_text(yaml.safe_dump(body))
    done = child(_FAILING, *paths)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.strip().splitlines()
    assert lines[2:] == ["False"]
    for line in lines[:2]:
        assert re.match(rf"{tmp_path}/broken/shard-\d+.tar: this shard is in the index but not in the folder", line)


_RANK = """
import sys
import lacuna

config = lacuna.load_config(sys.argv[-1])
for name in ("first", "second"):
    results = lacuna.train(config.model_copy(update={"name": name}))
    sys.stdout.write(f"map {name} {results.test['map']}\\n")  # in one piece: the other rank writes there, too
"""


def test_the_ranks_of_a_launch_train_together_twice(single_shards, tmp_path):
    """Both ranks call it, return the same results, and the second run starts in the same group."""
    script, path = tmp_path / "mine.py", tmp_path / "c.yaml"
    script.write_text(_RANK)
    path.write_text(yaml.safe_dump(config(single_shards, tmp_path, "ranks")))
    done = subprocess.run(command(2, str(path), script=str(script)), capture_output=True, text=True, env=environment(),
                          cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("map ")]
    assert len(lines) == 4
    assert len({line[2] for line in lines}) == 1  # equal seeds, equal results
    assert_equal_weights(tmp_path / "first", tmp_path / "second")


def test_the_results_are_typed():
    results = lacuna.Results.of("runs/x", {"best_step": 7, "val_map_skip_empty": 50.0, "val": {"map": 49.0}})
    assert (results.best_step, results.best_score, results.val, results.test) == (7, 50.0, {"map": 49.0}, {})
    assert not results.stopped
    assert lacuna.Results.of("runs/x", None).stopped
