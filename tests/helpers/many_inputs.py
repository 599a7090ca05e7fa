"""Fuzz inputs over all that reads what others wrote, as many as wanted: no crash, no hang, no undocumented error.

  python -m tests.helpers.many_inputs 1000000 --folder FOLDER
Inputs are made in numbered pieces, each in a process of its own with bounded memory; finished ones are in
FOLDER/pieces.jsonl, and the same command goes on where it was ended. What failed is in FOLDER/failed, and is seen again
with `--target NAME --number N`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import mmap
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path

from tests.helpers.fuzzing import SECONDS_PER_INPUT, Errors, Targets, fuzz, input_of

MODULES = ("tests.data_pipelines.test_fuzz_inputs", "tests.data_pipelines.readers.test_fuzz",
           "tests.trainer.config.test_fuzz", "tests.state_store.test_fuzz",
           "tests.tools.eval.test_fuzz", "tests.tools.test_fuzz_runs")
PIECE = 1000
_MEMORY = 8 << 30  # of addresses: many times what any of these small files may take
_FAILED = 3


class Piece:
    """Inputs `first`, `first` + 1, … of one target, in a child that may crash or hang."""

    def __init__(self, module: str, target: str, first: int, folder: Path):
        self.module, self.target, self.first, self.folder = module, target, first, folder
        self.at = mmap.mmap(-1, 8)  # the input that the child is at

    def run(self) -> list[str]:
        """What went wrong; after each failure the rest of the piece is tried all the same."""
        problems, start = [], self.first
        while start < self.first + PIECE:
            pid = os.fork()
            if pid == 0:
                self._child(start)
            code = self._wait(pid)
            if code == 0:
                break
            number = int.from_bytes(self.at[:8], "little")
            why = "hang" if code is None else "wrong error" if code == _FAILED else f"crash (exit code {code})"
            problems.append(f"{self.target} {number}: {why}")
            start = number + 1
        return problems

    def _wait(self, pid: int) -> int | None:
        """The exit code; None: no input was finished for a long time, and the child was killed."""
        seen, since = -1, time.monotonic()
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            now = int.from_bytes(self.at[:8], "little")
            if now != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > 6 * SECONDS_PER_INPUT:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return None
            time.sleep(0.01)

    def _child(self, start: int) -> None:
        try:
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
            warnings.simplefilter("ignore")
            with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
                targets, allowed = open_targets(self.module, Path(scratch))
                inputs, attempt = targets[self.target]
                for number in range(start, self.first + PIECE):
                    self.at[:8] = number.to_bytes(8, "little")
                    try:
                        fuzz(self.target, inputs, attempt, allowed, [number])
                    except AssertionError as error:
                        name = f"{self.target}-{number}".replace(" ", "_")
                        (self.folder / "failed").mkdir(exist_ok=True)
                        (self.folder / "failed" / f"{name}.txt").write_text(str(error), errors="replace")
                        (self.folder / "failed" / name).write_bytes(input_of(self.target, number, inputs))
                        os._exit(_FAILED)
            os._exit(0)
        finally:
            os._exit(70)


def open_targets(module: str, folder: Path) -> tuple[Targets, Errors]:
    loaded = importlib.import_module(module)
    return loaded.targets(folder), loaded.ALLOWED


def all_targets() -> list[tuple[str, str]]:
    """(module, target) of everything."""
    found = []
    for module in MODULES:
        with tempfile.TemporaryDirectory() as folder:
            found += [(module, name) for name in open_targets(module, Path(folder))[0]]
    return found


def main(count: int, folder: Path, first: int = 0) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pieces.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done, total = {(line["target"], line["first"]) for line in lines}, PIECE * len(lines)
    problems = [problem for line in lines for problem in line["problems"]]
    targets = all_targets()
    while total < count:
        for module, target in targets:
            if (target, first) not in done and total < count:
                found = Piece(module, target, first, folder).run()
                problems, total = problems + found, total + PIECE
                with open(path, "a", encoding="utf-8") as out:
                    out.write(json.dumps({"target": target, "first": first, "problems": found}) + "\n")
        first += PIECE
        print(f"{total:,} inputs over {len(targets)} targets, {len(problems)} problems", file=sys.stderr, flush=True)
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def once(target: str, number: int) -> None:
    """One input again, with its traceback."""
    module = next(module for module, name in all_targets() if name == target)
    with tempfile.TemporaryDirectory() as folder:
        targets, allowed = open_targets(module, Path(folder))
        fuzz(target, *targets[target], allowed, [number])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--first", type=int, default=0, help="number of the first input of every target: others than "
                        "an earlier folder's")
    parser.add_argument("--target")
    parser.add_argument("--number", type=int)
    args = parser.parse_args()
    sys.exit(once(args.target, args.number) if args.target else main(args.count, args.folder, args.first))
