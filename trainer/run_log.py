"""The run folder as people and programs read it: config, versions, log, metrics.jsonl, loggers, progress.

Every line names the launch that wrote it. A launch asks the fence now and then before it writes one; what it still
wrote after another launch had taken over is dropped by that one (loggers/ says what becomes of it there).
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import yaml
from tqdm import tqdm

import lacuna
from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.fence import Hold
from lacuna.basics.json_text import parse_json
from lacuna.basics.refusals import refusal
from lacuna.trainer.config.files import load_config
from lacuna.trainer.config.sections import Config
from lacuna.trainer.metrics.measures import RankingResult, write_table
from lacuna.trainer.pace import Remaining
from lacuna.trainer.run_folder import BAD_SAMPLES, CONFIG, LOG, METRICS, TRACE, RunFolder

if TYPE_CHECKING:
    from lacuna.trainer.loggers import Logger

_PACKAGES = ("torch", "torchvision", "timm", "deepspeed", "webdataset", "zarr", "numcodecs", "ray", "fsspec", "numpy")
_HANDLER = "lacuna run"  # the name of our log handlers: others are left alone
_EPOCHS = re.compile(r"phases\.\d+\.epochs:")  # these may grow: checkpoints/extending.py
CLASS_LIST = "classes.json"  # in the run folder: what the model's outputs are called
log = logging.getLogger("lacuna")


class RunLog:
    """Writes on rank 0; elsewhere nothing but traces."""

    def __init__(self, config: Config, folder: RunFolder, main: bool):
        self.config, self.run_folder, self.folder, self.main = config, folder, folder.local, main
        folder.before_push = self._flush
        self.bar: tqdm | None = None
        self.meter = Remaining()
        self.loggers: list[Logger] = []
        self.hold: Hold | None = None
        self.resumed_at = 0
        self._sizes: dict[str, int] = {}  # of a file if only this launch has written since it was tidied
        if main:
            _refuse_another_config(config, folder)
        _set_up_logging(self.folder, main)

    @property
    def metrics_path(self) -> str:
        return os.path.join(self.folder, METRICS)

    @property
    def bad_samples_path(self) -> str:
        return os.path.join(self.folder, BAD_SAMPLES)

    def rewind(self, total_steps: int, hold: Hold) -> None:
        """Begin to write, at the checkpoint that training resumes from: what came after it will be written again."""
        self.hold, self.resumed_at = hold, total_steps
        self._rewind_traces()
        if not self.main:
            return
        storage.remove([os.path.join(self.folder, name) for name in storage.list_names(self.folder)
                        if name.endswith(".partial")])  # of launches that were killed while they wrote
        resolved = yaml.safe_dump(self.config.model_dump(mode="json"), sort_keys=False)
        storage.write_atomic(os.path.join(self.folder, CONFIG), resolved.encode())
        storage.write_atomic(os.path.join(self.folder, "versions.json"), json.dumps(versions(), indent=1).encode())
        self._tidy()
        from lacuna.trainer.loggers import open_loggers

        self.loggers = open_loggers(self.config, self.run_folder, total_steps)
        self._catch_up([logger for logger in self.loggers if logger.catches_up])
        self.run_folder.push()

    def write_class_list(self, names: list[str], ids: list[str]) -> None:
        """The model outlives its training set: whoever uses it must still know what its outputs are."""
        if self.main:
            body = json.dumps({"classes": names, "class_ids": ids}, ensure_ascii=False, indent=1)
            storage.write_atomic(os.path.join(self.folder, CLASS_LIST), body.encode())

    def check(self) -> None:
        """LostLaunch if another launch has taken over; before results, and before what cannot be dropped again."""
        if self.hold is not None:
            self.hold.check()

    def _append(self, path: str, lines: list[dict]) -> None:
        assert self.hold is not None, "rewind comes first"
        self.hold.glance()
        with open(path, "ab") as f:
            start = f.tell()
            f.write(b"".join(json.dumps({**line, "launch": self.hold.launch}).encode() + b"\n" for line in lines))
            self._sizes[path] = self._sizes.get(path, 0) + f.tell() - start

    def _tidy(self) -> None:
        """Drop lines that other launches wrote beyond the checkpoint that this one went on from."""
        launch, at = (self.hold.launch if self.hold else 0), self.resumed_at
        for path, last in ((self.metrics_path, at), (self.bad_samples_path, at - 1)):
            if not os.path.exists(path) or self._sizes.get(path) == os.path.getsize(path):
                continue

            def counts(line: dict, last: int = last) -> bool:
                return line.get("launch", 0) >= launch or (line["step"] <= last and line.get("kind") != "result")

            _keep_lines(path, counts)
            self._sizes[path] = os.path.getsize(path)

    def write(self, kind: str, step: int, values: dict) -> None:
        """One JSON line, and the numbers to the loggers."""
        if not self.main:
            return
        self._append(self.metrics_path, [{"kind": kind, "step": step, **values}])
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        for logger in self.loggers:
            logger.write(kind, step, numbers)

    def _catch_up(self, loggers: list[Logger]) -> None:
        lines = metric_lines(storage.read_bytes(self.metrics_path)) if loggers and os.path.exists(
            self.metrics_path) else []
        for line in lines:
            numbers = {key: value for key, value in line.items()
                       if key not in ("step", "launch") and isinstance(value, int | float)}
            for logger in loggers:
                logger.write(line["kind"], line["step"], numbers)

    def write_classes(self, name: str, result: RankingResult, names: list[str], ids: list[str]) -> None:
        if self.main:
            self.check()
            write_table(os.path.join(self.folder, f"{name}_classes.csv"), result.table(names, ids))

    def write_bad_samples(self, lines: list[dict]) -> None:
        if self.main and lines:
            self._append(self.bad_samples_path, lines)

    def trace(self, step: int, shards: list[int], rows: list[int]) -> None:
        """Every rank writes its own file; of a step's lines, those of the newest launch count."""
        path = self.run_folder.path(self.run_folder.trace_name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._append(path, [{"step": step, "samples": list(zip(shards, rows, strict=True))}])

    def _rewind_traces(self) -> None:
        """Every rank its own file, rank 0 also those of ranks that are no more."""
        root, own = self.run_folder.path(TRACE), os.path.basename(self.run_folder.trace_name)
        ranks = {f"rank-{rank}.jsonl" for rank in range(self.run_folder.world.size)}
        for name in storage.list_names(root):
            whose = name.partition(".jsonl")[0] + ".jsonl"
            if whose == own or (self.main and whose not in ranks):
                if name == whose:
                    _keep_lines(os.path.join(root, name), lambda line: line["step"] <= self.resumed_at)
                else:
                    storage.remove([os.path.join(root, name)])  # of a launch that was killed while it rewound

    def begin_epoch(self, label: str, total: int, done: int, after: int) -> None:
        """Of `total` steps `done` are behind us; `after` more come in later epochs."""
        self.meter.begin_epoch(total - done, after)
        if self.main and sys.stderr.isatty():
            self.bar = tqdm(total=total, initial=done, desc=label, unit="step", dynamic_ncols=True)

    def progress(self, text: str, due: bool) -> None:
        """A bar moves every step; without a terminal, a plain line comes when there is something to say."""
        if self.bar is not None:
            self.bar.update()
            if due:
                self.bar.set_postfix_str(text)  # the bar itself says what is left of the epoch
        elif due:
            log.info("%s", text)

    def end_epoch(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def _flush(self) -> None:
        for logger in self.loggers:
            logger.flush()

    def close(self, whole: bool = True) -> None:
        """`whole`: all ranks got here, so the rest can be uploaded; after an error that is left to the next launch."""
        self.end_epoch()
        for logger in self.loggers:
            logger.close(whole)
        self.loggers = []
        if whole:
            if self.main and self.hold is not None:
                self._tidy()
            self.run_folder.close()
        else:
            self.run_folder.let_go()


def metric_lines(text: bytes) -> list[dict]:
    """Every whole line of metrics.jsonl that counts; a last one that a kill cut short is left out, as damaged ones are.

    A launch that was replaced may have written some more: of one kind and step, the newest launch's lines count.
    """
    lines = [line for part in text.split(b"\n")[:-1] if (line := _whole_line(part)) is not None]
    newest: dict[tuple, int] = {}
    for line in lines:
        place = (line.get("kind"), line["step"])
        newest[place] = max(newest.get(place, 0), line.get("launch", 0))
    return [line for line in lines if line.get("launch", 0) == newest[line.get("kind"), line["step"]]]


def _whole_line(text: bytes) -> dict | None:
    try:
        line = parse_json(text)
    except ValueError:
        return None
    numbers = isinstance(line, dict) and [line.get("step"), line.get("launch", 0)]
    whole = numbers and all(type(number) is int and 0 <= number < 2**53 for number in numbers)
    return line if whole and isinstance(line.get("kind", ""), str) else None


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
        changed = [key for key in load_config(path, []).differences(config) if not _EPOCHS.match(key)]
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


class _LogFile(logging.FileHandler):
    """On a full disk the log goes on without its file, and says so once."""

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        log.removeHandler(self)
        self.stream = None  # what is buffered cannot be written either
        log.warning("the log is no longer written: %s", (error and refusal(error, self.baseFilename)) or error)


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
        handlers.append(_LogFile(os.path.join(folder, LOG), encoding="utf-8"))
    for handler in handlers:
        handler.name = _HANDLER
        handler.setFormatter(form)
        log.addHandler(handler)
