"""How long commands and launches take to start, beside what torch and DeepSpeed take by themselves.

Seconds by the clock; every turn measures each once, and medians count:
  commands    from the shell to the end: `--help` of commands that import torch, and one that computes
  launches    from the shell to the first step's line in metrics.jsonl (ROLE on small images, state out of core)
Ratios:
  commands_vs_torch     the slowest of these commands ÷ `python -c "import torch"` [below 3 s in all]
  one_rank_vs_bare      a launch of one rank ÷ a bare script: import, deepspeed.initialize, one step of a linear layer
  two_ranks_vs_bare     the same on two ranks, which meet through gloo [≤ 15 s in all]
The bare script is started the same way. The full form also starts the two ranks by DeepSpeed's launcher.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

import yaml

from lacuna.basics.errors import UserError
from lacuna.tools.bench.tax import make_data
from lacuna.tools.launches import Launch, command, environment, read_lines

_TORCH = "import torch"
_COMMANDS = {"methods": ("methods", "role"), "eval": ("eval", "--help"), "suggest": ("suggest", "--help"),
             "report": ("report", "--help")}
_QUICK_COMMANDS = ("methods", "suggest")
_BARE = """
import sys
import torch
import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it is compiled first
deepspeed.init_distributed(dist_backend="gloo", verbose=False)
layer = torch.nn.Linear(8, 8)
engine, *_ = deepspeed.initialize(
    model=layer, optimizer=torch.optim.Adam(layer.parameters(), lr=1e-3), dist_init_required=False,
    config={"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True})
engine.backward(engine(torch.ones(4, 8)).sum())
engine.step()
open(sys.argv[-1], "w").close()
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--turns", type=int, help="of everything (default 5, quick: 1)")
    parser.add_argument("--images", type=int, default=64, help="of the dataset (default 64)")


def run(quick: bool, args: argparse.Namespace) -> dict:
    turns = args.turns or (1 if quick else 5)
    if turns < 1 or args.images < 64:
        raise UserError(f"--turns {turns}, --images {args.images}: give at least 1 and 64.")
    found: dict[str, list[float]] = defaultdict(list)
    names = _QUICK_COMMANDS if quick else tuple(_COMMANDS)
    with tempfile.TemporaryDirectory(prefix="lacuna-start-") as folder:
        make_data(folder, 10, args.images, args.images // 4)
        bare = os.path.join(folder, "bare.py")
        with open(bare, "w", encoding="utf-8") as f:
            f.write(_BARE)
        for turn in range(turns):
            found["import_torch"].append(_seconds([sys.executable, "-c", _TORCH]))
            for name in names:
                words = [sys.executable, "-m", "lacuna.tools.cli", *_COMMANDS[name]]
                found[f"lacuna_{name}"].append(_seconds(words))
            for ranks, said in ((1, "one_rank"), (2, "two_ranks")):
                found[f"bare_{said}"].append(_bare(folder, f"bare-{said}-{turn}", bare, ranks))
                found[said].append(_launch(folder, f"{said}-{turn}", ranks))
            if not quick:
                found["two_ranks_by_deepspeed"].append(_launch(folder, f"deepspeed-{turn}", 2, deepspeed=True))
    seconds = {name: round(statistics.median(times), 3) for name, times in found.items()}
    slowest = max(seconds[f"lacuna_{name}"] for name in names)
    return {"ratios": {"commands_vs_torch": round(slowest / seconds["import_torch"], 2),
                       "one_rank_vs_bare": round(seconds["one_rank"] / seconds["bare_one_rank"], 2),
                       "two_ranks_vs_bare": round(seconds["two_ranks"] / seconds["bare_two_ranks"], 2)},
            "seconds": seconds, "turns": turns}


def _seconds(words: list[str]) -> float:
    began = time.monotonic()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=environment())
    return time.monotonic() - began


def _launch(folder: str, name: str, ranks: int, deepspeed: bool = False) -> float:
    path, metrics = os.path.join(folder, name + ".yaml"), os.path.join(folder, name, "metrics.jsonl")
    with open(path, "w", encoding="utf-8") as f:
        yaml.safe_dump({
            "name": name, "run_folder": folder,
            "data": {"train": {"url": folder + "/data"}, "image_size": 32, "streams": 2, "open_shards": 2},
            "model": {"backbone": "lacuna:tiny", "expected_positives": 1.2}, "method": {"name": "role"},
            "phases": [{"name": "all", "epochs": 1, "batch": 8, "lr": 1e-3}], "train": {"log_every": 1},
        }, f)
    words = command(ranks, "--config", path, deepspeed=deepspeed)
    return _until(words, folder, name, lambda: bool(read_lines(metrics)))


def _bare(folder: str, name: str, script: str, ranks: int) -> float:
    done = os.path.join(folder, name + ".done")
    variables = {} if ranks > 1 else {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
                                      "MASTER_PORT": "0"}
    return _until(command(ranks, done, script=script), folder, name, lambda: os.path.exists(done), **variables)


def _until(words: list[str], folder: str, name: str, reached, **variables: str) -> float:
    began = time.monotonic()
    launch = Launch(words, os.path.join(folder, name + ".out"), environment(**variables), folder)
    try:
        launch.wait_until(reached, f"the first step of {name}")
        return time.monotonic() - began
    finally:
        launch.signal_all(signal.SIGKILL)
        launch.wait()
