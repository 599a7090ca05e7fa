"""The run folder as people and programs read it: config, versions, log, metrics.jsonl, TensorBoard, progress."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import yaml
from tqdm import tqdm

import lacuna
from lacuna.basics import storage
from lacuna.basics.clock import clock
from lacuna.basics.errors import UserError
from lacuna.trainer.config.files import load_config
from lacuna.trainer.config.sections import Config
from lacuna.trainer.metrics.measures import RankingResult, write_table
from lacuna.trainer.run_folder import BAD_SAMPLES, CONFIG, LOG, METRICS, RunFolder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_PACKAGES = ("torch", "torchvision", "timm", "deepspeed", "webdataset", "zarr", "numcodecs", "ray", "fsspec", "numpy")
_HANDLER = "lacuna run"  # the name of our log handlers: others are left alone
CLASS_LIST = "classes.json"  # in the run folder: what the model's outputs are called
log = logging.getLogger("lacuna")


class RunLog:
    """Writes on rank 0, does nothing elsewhere."""

    def __init__(self, config: Config, folder: RunFolder, main: bool):
        self.config, self.run_folder, self.folder, self.main = config, folder, folder.local, main
        folder.before_push = self._flush
        self.bar: tqdm | None = None
        self.meter = RateMeter()
        self.board: SummaryWriter | None = None
        if main:
            _refuse_another_config(config, folder)
        _set_up_logging(self.folder, main)

    @property
    def metrics_path(self) -> str:
        return os.path.join(self.folder, METRICS)

    @property
    def bad_samples_path(self) -> str:
        return os.path.join(self.folder, BAD_SAMPLES)

    def rewind(self, total_steps: int) -> None:
        """Begin to write, at the checkpoint that training resumes from: what came after it will be written again."""
        if not self.main:
            return
        resolved = yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False)
        storage.write_atomic(os.path.join(self.folder, CONFIG), resolved.encode())
        storage.write_atomic(os.path.join(self.folder, "versions.json"), json.dumps(versions(), indent=1).encode())
        _keep_lines(self.metrics_path, lambda line: line["step"] <= total_steps and line["kind"] != "result")
        _keep_lines(self.bad_samples_path, lambda line: line["step"] < total_steps)
        from torch.utils.tensorboard import SummaryWriter

        self.board = SummaryWriter(os.path.join(self.folder, "tensorboard"), purge_step=total_steps + 1)
        self.run_folder.push()

    def write_class_list(self, names: list[str], ids: list[str]) -> None:
        """The model outlives its training set: whoever uses it must still know what its outputs are."""
        if self.main:
            body = json.dumps({"classes": names, "class_ids": ids}, ensure_ascii=False, indent=1)
            storage.write_atomic(os.path.join(self.folder, CLASS_LIST), body.encode())

    def write(self, kind: str, step: int, values: dict) -> None:
        """One JSON line, and the numbers to TensorBoard."""
        if not self.main:
            return
        with open(self.metrics_path, "a", encoding="utf-8") as f:
            f.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        for key, value in values.items():
            if self.board is not None and isinstance(value, int | float):
                self.board.add_scalar(f"{kind}/{key}", value, step)

    def write_classes(self, name: str, result: RankingResult, names: list[str], ids: list[str]) -> None:
        if self.main:
            write_table(os.path.join(self.folder, f"{name}_classes.csv"), result.table(names, ids))

    def write_bad_samples(self, lines: list[dict]) -> None:
        if self.main and lines:
            with open(self.bad_samples_path, "a", encoding="utf-8") as f:
                f.writelines(json.dumps(line) + "\n" for line in lines)

    def trace(self, step: int, shards: list[int], rows: list[int]) -> None:
        """Every rank writes its own file; after a resume, the last line of a step counts."""
        path = self.run_folder.path(self.run_folder.trace_name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "a", encoding="utf-8") as f:
            f.write(json.dumps({"step": step, "samples": list(zip(shards, rows, strict=True))}) + "\n")

    def begin_epoch(self, label: str, total: int, done: int) -> None:
        self.meter.restart(total - done)
        if self.main and sys.stderr.isatty():
            self.bar = tqdm(total=total, initial=done, desc=label, unit="step", dynamic_ncols=True)

    def progress(self, text: str, due: bool) -> None:
        """A bar moves every step; without a terminal, a plain line comes when there is something to say."""
        self.meter.tick()
        if self.bar is not None:
            self.bar.update()
            if due:
                self.bar.set_postfix_str(text)
        elif due:
            log.info("%s, %s left in this epoch", text, clock(self.meter.seconds_left()))

    def end_epoch(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _flush(self) -> None:
        if self.board is not None:
            self.board.flush()

    def close(self, whole: bool = True) -> None:
        """`whole`: all ranks got here, so the rest can be uploaded; after an error that is left to the next launch."""
        self.end_epoch()
        if self.board is not None:
            self.board.close()
            self.board = None
        if whole:
            self.run_folder.close()
        else:
            self.run_folder.let_go()


class RateMeter:
    """Time left from the pace of this launch, without its first steps (compilation, cold caches)."""

    WARM_UP = 3

    def restart(self, steps: int) -> None:
        self.left, self.ticks, self.since = steps, 0, time.monotonic()

    def tick(self) -> None:
        self.left, self.ticks = self.left - 1, self.ticks + 1
        if self.ticks == self.WARM_UP:
            self.since = time.monotonic()

    def seconds_left(self) -> float:
        counted = self.ticks - self.WARM_UP if self.ticks > self.WARM_UP else self.ticks
        return self.left * (time.monotonic() - self.since) / max(1, counted)


def metric_lines(text: bytes) -> list[dict]:
    """Every whole line of metrics.jsonl; a last one that a kill cut short is left out."""
    return [json.loads(line) for line in text.split(b"\n")[:-1]]


def _keep_lines(path: str, keep: Callable[[dict], bool]) -> None:
    if os.path.exists(path):
        kept = [json.dumps(line) + "\n" for line in metric_lines(storage.read_bytes(path)) if keep(line)]
        storage.write_atomic(path, "".join(kept).encode())


def _refuse_another_config(config: Config, folder: RunFolder) -> None:
    """A folder with checkpoints goes on with the config that made them; nothing of it is overwritten before that."""
    path, root = folder.path(CONFIG), storage.join(folder.url, "checkpoints")
    if not os.path.exists(path) or not any(storage.exists(storage.join(root, name, "COMMIT.json"))
                                           for name in storage.list_names(root)):
        return
    try:
        changed = load_config(path, []).differences(config)
    except UserError:
        return  # written by another version: the checkpoint's own fingerprint decides
    if changed:
        raise UserError(f"{folder.url} holds checkpoints made with another config ({'; '.join(changed)}). "
                        f"Use another name=…, or remove that folder to start again.")


def versions() -> dict:
    found = {name: _version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), "lacuna": lacuna.__version__, "git": _git_sha(), **found}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_sha() -> str | None:
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        done = subprocess.run(["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
                              capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _set_up_logging(folder: str, main: bool) -> None:
    log.setLevel(logging.INFO if main else logging.WARNING)
    log.propagate = False
    for handler in [handler for handler in log.handlers if handler.name == _HANDLER]:  # of another run
        log.removeHandler(handler)
        handler.close()
    form = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if main:
        os.makedirs(folder, exist_ok=True)
        handlers.append(logging.FileHandler(os.path.join(folder, LOG), encoding="utf-8"))
    for handler in handlers:
        handler.name = _HANDLER
        handler.setFormatter(form)
        log.addHandler(handler)
