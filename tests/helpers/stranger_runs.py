"""A run folder as a stranger may hand it over: made by hand, so that everything in it can be anything."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save

from lacuna.trainer.checkpoints.commits import signed
from lacuna.trainer.checkpoints.files import facts_of

STEP = "checkpoints/step-00000006"
CONFIG = {"name": "run", "run_folder": "/nowhere", "method": {"name": "an"},
          "data": {"train": {"url": "/nowhere/train"}, "val": {"url": "/nowhere/val"}},
          "phases": [{"name": "all", "epochs": 1, "batch": 8, "lr": 0.1}]}
FILES = {
    "config.yaml": CONFIG,
    "results.json": {"val_map_skip_empty": 50.0, "best_step": 6, "val": {"map": 50.0, "map_skip_empty": 50.0},
                     "test": {"map": 40.0, "map_skip_empty": 40.0}},
    "versions.json": {"lacuna": "1", "torch": "2", "python": "3.11"},
    "classes.json": {"classes": ["cat", "dog"], "class_ids": ["1", "2"]},
}
LINES = [{"kind": "train", "step": 3, "launch": 1, "phase": "all", "epoch": 0, "loss": 0.5, "lr": 0.1,
          "data_wait_seconds": 0.1, "state_bytes_read": 100},
         {"kind": "epoch", "step": 6, "launch": 1, "phase": "all", "epoch": 0, "loss": 0.4, "bad": 0,
          "val_map_skip_empty": 50.0}]
TABLE = "id,name,positives,ap\n1,cat,3,50.0\n2,dog,0,\n"


def make_run(run: Path) -> None:
    (run / STEP).mkdir(parents=True)
    for name, body in FILES.items():
        (run / name).write_text(json.dumps(body))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    for split in ("val", "test"):
        (run / f"{split}_classes.csv").write_text(TABLE)
    (run / STEP / "model.safetensors").write_bytes(save({"head.weight": torch.zeros(2, 3)}))
    sign(run, {})


def sign(run: Path, extra: dict) -> None:
    """A commit that fits its files, as a stranger can make one."""
    files = {"model.safetensors": facts_of(str(run / STEP / "model.safetensors"))}
    (run / STEP / "COMMIT.json").write_bytes(signed({"files": files, "world": 1, "zero_stage": 0, "fingerprints": {},
                                                     "position": {"best_step": 6}, **extra}))
