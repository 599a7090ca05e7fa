"""A short real training on a few shards, on one rank, to learn what only running can tell: bytes, memory and time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace

import numpy as np
import yaml

from lacuna import state_store
from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.places import RUN_SCRIPT
from lacuna.basics.process_memory import peak_resident_bytes
from lacuna.basics.progress import Progress
from lacuna.data_pipelines.index import ShardIndex, SidecarWriter
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.subsets import Subset
from lacuna.state_store.slots import Slots
from lacuna.tools.launches import environment, read_lines
from lacuna.trainer.config.sections import Config

_STEPS_TO_KNOW_THE_PACE = 5
_STEPS_OF_A_PHASE = 9
_FEW = "few"


@dataclass(frozen=True)
class Calibration:
    """Measured on one rank with that rank's share of the batch."""

    samples: int  # in the shards that were used
    step_seconds: list[float]  # by phase
    peak_bytes: int  # resident memory of the process at its worst
    slots: int  # shards whose state was in memory
    stored: dict[str, float]  # field → compressed bytes per sample
    checkpoint_bytes: int


def calibrate(config: Config, source: ShardSource, ranks: int, seconds: float, folder: str) -> Calibration:
    """Train the first phase on a few shards until two epochs or the time is over; then some steps of every phase, if
    there are several: they differ in what learns, and methods do other things in later ones."""
    streams = max(1, config.data.streams // ranks)
    used = np.flatnonzero(source.counts)
    wanted = min(len(used), streams * (config.data.open_shards + 2))
    shards = used[np.linspace(0, len(used) - 1, wanted).astype(int)].tolist()
    view = _view(source, shards, os.path.join(folder, "data"))
    body = config.model_dump(mode="json")
    body |= {"name": "calibration", "run_folder": folder}
    body["data"] |= {"val": None, "test": None, "streams": streams,
                     "train": {"url": view.url, "labels": config.data.train.labels}}
    # Without a cache: the pace is then that of the epochs that fill one.
    phases = [{**phase, "batch": phase["batch"] // ranks, "cache": None} for phase in body["phases"]]
    body["phases"] = [{**phases[0], "epochs": 2}]
    body["train"] |= {"log_every": 1, "checkpoint_every": "1ep", "keep": 1, "state_url": None, "trace_samples": False}
    if config.data.val is not None and config.model.expected_positives is None:  # it would come from there
        body["model"]["expected_positives"] = 1.0
    peak = _train(body, folder, seconds, f"calibrating on {len(shards)} of {len(used)} shards")
    found = _read(os.path.join(folder, "calibration"), view, config, peak)
    if len(phases) == 1:
        return found
    _few(view, _STEPS_OF_A_PHASE * max(phase["batch"] for phase in phases)).save()
    body["name"] = "phases"
    body["data"]["train"]["subset"] = _FEW
    body["phases"] = [{**phase, "epochs": 1, "warmup": "20%"} for phase in phases]
    body["train"]["keep"] = len(phases)
    peak = _train(body, folder, seconds, f"some steps of {len(phases)} phases")
    later = _read(os.path.join(folder, "phases"), view, config, peak)
    return replace(found, step_seconds=found.step_seconds + later.step_seconds[1:],
                   peak_bytes=max(found.peak_bytes, later.peak_bytes),
                   checkpoint_bytes=max(found.checkpoint_bytes, later.checkpoint_bytes))


def _few(view: ShardIndex, wanted: int) -> Subset:
    """About so many samples, some of every shard."""
    each = -(-wanted // len(view.shards))
    return Subset.from_masks(view, _FEW, [np.arange(shard.count) < each for shard in view.shards], {})


def _train(body: dict, folder: str, seconds: float, title: str) -> int:
    """The peak resident bytes of a launch that is asked to stop after some time, once every phase has a pace."""
    print(f"{title}: starting a rank", file=sys.stderr, flush=True)
    run = os.path.join(folder, body["name"])
    with open(f"{run}.yaml", "w", encoding="utf-8") as f:
        yaml.safe_dump(body, f)
    log = f"{run}.out"
    with open(log, "wb") as out:
        process = subprocess.Popen([sys.executable, RUN_SCRIPT, "--config", f"{run}.yaml"], stdout=out,
                                   stderr=subprocess.STDOUT, env=environment(), start_new_session=True)
    began, asked, peak = time.monotonic(), False, 0
    with Progress(None, title, "steps") as meter:
        while process.poll() is None:
            peak = max(peak, peak_resident_bytes(process.pid))
            late = time.monotonic() - began > seconds
            meter.advance(len(_steps(run)) - meter.done)
            if late and not asked and len(_paces(run, body["phases"][-1]["name"])) > _STEPS_TO_KNOW_THE_PACE:
                os.kill(process.pid, signal.SIGTERM)
                asked = True
            time.sleep(0.1)
    if process.returncode:
        with open(log, encoding="utf-8", errors="replace") as f:
            lines = f.read().strip().splitlines()
        said = next((line for line in reversed(lines) if line.startswith("lacuna: ")), lines[-1] if lines else "")
        raise UserError(f"the calibration failed: {said.removeprefix('lacuna: ')}")
    return peak


def _steps(run: str) -> list[dict]:
    return [line for line in read_lines(os.path.join(run, "metrics.jsonl")) if line["kind"] == "train"]


def _paces(run: str, phase: str) -> list[float]:
    """Samples per second of a phase's steps."""
    return [line["samples_per_second"] for line in _steps(run) if line["phase"] == phase]


def _seconds_per_step(run: str, phase: dict) -> float:
    paces = _paces(run, phase["name"])
    warm = paces[len(paces) // 3 :]  # the first steps start threads and fill caches
    return float(np.mean([phase["batch"] / pace for pace in warm]))


def _read(run: str, view: ShardIndex, config: Config, peak: int) -> Calibration:
    phases = yaml.safe_load(storage.read_bytes(os.path.join(run, "config.yaml")))["phases"]
    root = os.path.join(run, "checkpoints")
    kept = [name for name in os.listdir(root) if name.startswith("step-")]
    newest = max(kept)
    size = max(sum(os.path.getsize(os.path.join(base, name)) for base, _, names in os.walk(os.path.join(root, one))
                   for name in names) for one in kept)
    stored: dict[str, float] = {}
    slots = 0
    if os.path.exists(os.path.join(run, "state")):
        store = state_store.open(os.path.join(run, "state"))
        refs = store.manifest(newest).refs
        for name in store.schema.fields:
            count = int(sum(store.schema.counts[shard] for shard in refs.get(name, {})))
            stored[name] = sum(ref.size for ref in refs.get(name, {}).values()) / max(1, count)
        slots = Slots.count_within(store.schema, int(config.train.state_budget_mb * 2**20))
    return Calibration(view.samples, [_seconds_per_step(run, phase) for phase in phases], peak, slots, stored, size)


def _view(source: ShardSource, shards: list[int], folder: str) -> ShardIndex:
    """A dataset of some shards of another one: links to local tars, copies of remote ones."""
    old = source.index
    os.makedirs(os.path.join(folder, "members"))
    for shard in shards:
        for url, name in ((old.shard_url(shard), old.shards[shard].name),
                          (old.members_url(shard), f"members/{old.shards[shard].stem}.npz")):
            if storage.is_local(url):
                os.symlink(os.path.abspath(storage.local_path(url)), os.path.join(folder, name))
            else:
                storage.download(url, os.path.join(folder, name))
    index = ShardIndex(folder, old.classes, [old.shards[shard] for shard in shards], old.split, old.kind, old.class_ids)
    index.save()
    writer = SidecarWriter(index, source.sidecar.name, source.sidecar.unlisted, {})
    for place, shard in enumerate(shards):
        writer.write(place, source.sidecar.labels(shard))
    writer.close()
    return index
