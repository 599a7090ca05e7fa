"""Training in this process on a few features: a whole run with state, validation and checkpoints takes a second."""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from lacuna import state_store
from lacuna.basics import storage
from lacuna.data_pipelines.annotation.annotate import SCHEMES, annotate
from lacuna.data_pipelines.annotation.labelled_rows import LabelledRows
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import features
from lacuna.tools.launches import timeless
from lacuna.trainer import loop, whole_run, world
from lacuna.trainer.assemble import build_run
from lacuna.trainer.config.sections import parse_config
from tests.helpers.launching import last_checkpoint, metrics

EPOCHS, BATCH, ROWS, CLASSES, WIDTH = 4, 16, 64, 6, 8
STEPS = EPOCHS * ROWS // BATCH
_STEP = loop.take_step


class Left(Exception):
    """The run was left as a kill leaves it."""


AGAINST = {"val": (40, -1)}  # split → rows, and whether what is learnt is right there
ALONG = {"val": (40, 1), "test": (40, 1)}


def make_data(folder: Path, others: dict[str, tuple[int, int]] = AGAINST) -> None:
    """train (64 rows in 8 shards, one positive each in the sidecar `single`) and others, a linear problem.

    By default what is learnt is wrong on val: the first epoch stays the best, so its checkpoint is kept beside the
    newest.
    """
    draws = np.random.RandomState(3)
    truth = draws.randn(WIDTH, CLASSES)
    for split, (rows, sign) in {"train": (ROWS, 1), **others}.items():
        values = draws.randn(rows, WIDTH).astype(np.float32)
        labels = (sign * values @ truth + 0.3 * draws.randn(rows, CLASSES) > 1).astype(np.int8)
        labels[:, 0] |= labels.sum(1) == 0
        np.save(folder / f"{split}.npy", values)
        np.save(folder / f"{split}-labels.npy", labels)
        made = features.read(str(folder / f"{split}.npy"), str(folder / f"{split}-labels.npy"), split=split)
        pack(made, str(folder / split), Layout(streams=1, rows_per_shard=8), workers=1)
    index = ShardIndex.load(str(folder / "train"))
    annotate(LabelledRows(index, Sidecar.load(index, "labels")), "single", "single_positive",
             SCHEMES["single_positive"]())


def body(folder: Path, name: str) -> dict:
    """EN keeps running scores with a histogram; a checkpoint at every third step and every epoch's end."""
    return {"name": name, "run_folder": str(folder),
            "data": {"train": {"url": str(folder / "train"), "labels": "single"}, "val": {"url": str(folder / "val")},
                     "streams": 2, "open_shards": 2, "workers": 1},
            "model": {"backbone": "features", "expected_positives": 2.0}, "method": {"name": "en"},
            "phases": [{"name": "all", "epochs": EPOCHS, "batch": BATCH, "lr": 0.05}],
            "train": {"log_every": 1, "checkpoint_every": "3st", "keep": 2}}


class Trainer:
    """One process group for many runs one after another."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.world = world.start(120)
        self.watchdog = world.Watchdog(self.world, 120)
        self.watchdog.stop()  # this process goes on for longer than that with other tests: it would end all of them
        atexit.register(_leave)

    def train(self, config: dict, leave: int | None = None) -> None:
        """To the end, or left before a step without closing anything."""
        def step(phase, batch, position):
            if position.total_steps == leave:
                raise Left
            return _STEP(phase, batch, position)

        loop.take_step = step
        run = build_run(parse_config(config, "test"), self.world, self.watchdog)
        try:
            results = whole_run.train(run)
        except BaseException as error:
            if hasattr(run.state, "session"):
                run.state.session._io.stop()  # its threads would die with the process
            if isinstance(error, Left):
                return
            raise
        storage.write_atomic(os.path.join(run.config.folder, "results.json"), json.dumps(results).encode())
        run.run_log.close()
        run.state.close()


def _leave() -> None:
    """The group's threads must end before the interpreter does, which else may abort."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def outcome(folder: Path) -> tuple[dict, dict, list, dict]:
    """Weights, rows of every field, lines and results of a finished run, to be compared with another's."""
    store = state_store.open(str(folder / "state"))
    reader = store.reader(store.snapshots()[-1].name)
    rows = {f"{name} {shard}": reader.read_shard(name, shard).tolist() for name in store.schema.fields
            for shard in range(store.schema.shards)}
    weights = {name: t.tolist() for name, t in load_file(last_checkpoint(folder) / "model.safetensors").items()}
    return weights, rows, timeless(metrics(folder)), json.loads((folder / "results.json").read_text())
