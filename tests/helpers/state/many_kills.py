"""Kills of processes that write a bare store, as many as wanted: nothing committed may be lost or changed.

  python -m tests.helpers.state.many_kills 700 --folder FOLDER --seed 1
Workers are forked from this process, so a kill costs a tenth of a second. Every twentieth store
is on a failing S3 server.
Stores are numbered and written to FOLDER/stores.jsonl; the same command goes on where it was ended.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

from lacuna import state_store
from lacuna.tools.drill.matrix.events import Events
from lacuna.tools.drill.matrix.ranks import in_child
from lacuna.tools.drill.matrix.s3 import Server
from tests.helpers.state.crash_worker import main as work
from tests.helpers.state.crashes import MODEL, last_committed

KILLS_PER_STORE, EVENTS = 25, 250  # of about five steps
_MANY = 10_000


class Store:
    """One store that lives through many kills."""

    def __init__(self, url: str, folder: Path, rng: random.Random):
        self.url, self.folder, self.rng = url, folder, rng
        self.output = str(folder / "last.out")

    def live(self) -> dict:
        """The line of a store that survived; an AssertionError says what was lost."""
        newest, kills, at = -1, 0, []
        for _ in range(KILLS_PER_STORE):
            event = self.rng.randint(1, EVENTS) if self.rng.random() < 0.7 else 0
            code, seen, last = self._worker(_MANY, event, self.rng.random() * 0.6)
            assert code == -signal.SIGKILL, f"the worker ended with {code}:\n{Path(self.output).read_text()[-2000:]}"
            MODEL(newest + 200)  # here, so that the next child has it
            after = in_child(lambda: last_committed(self.url), self.output)
            assert after >= newest, f"snapshot {newest} is gone, the newest is {after}; killed {last!r}, event {seen}"
            newest, kills = after, kills + (after >= 0)
            at.append(last)
        code, _, _ = self._worker(2, 0, 600)
        assert code == 0, Path(self.output).read_text()[-2000:]
        after, orphans = in_child(lambda: (last_committed(self.url), state_store.open(self.url).orphans()), self.output)
        assert after == newest + 2, f"after two more steps the newest is {after}, not {newest + 2}"
        assert orphans == []
        return {"kills": kills, "steps": after, "events": at}

    def _worker(self, steps: int, deadly: int, seconds: float) -> tuple[int, int, str]:
        """Run it until it dies at an event, or kill it after some time; (exit code, events, the last one)."""
        events = Events(1)
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
            os.dup2(1, 2)
            events.watch(0, deadly, everybody=False)
            try:
                work(self.url, steps)
            except BaseException:
                os.write(2, traceback.format_exc().encode())
                os._exit(70)
            os._exit(0)
        end = time.monotonic() + (600 if deadly else seconds)
        status = 0
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status), events.count(0), events.last(0)
            time.sleep(0.005)
        os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), events.count(0), events.last(0)


def main(kills: int, folder: Path, seed: int) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    path, server = folder / "stores.jsonl", None
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    total = sum(line["kills"] for line in lines)
    try:
        while total < kills:
            number, remote = len(lines), len(lines) % 20 == 19
            if remote and server is None:
                server = Server()
                os.environ |= server.variables
            url = f"s3://bucket/store-{number}-{time.time_ns()}" if remote else str(folder / f"store-{number}")
            shutil.rmtree(folder / f"store-{number}", ignore_errors=True)
            (folder / "last.out").write_text("")
            store = Store(url, folder, random.Random(f"{seed}/{number}"))
            lines.append({"store": number, "remote": remote, **store.live()})
            total += lines[-1]["kills"]
            with open(path, "a", encoding="utf-8") as out:
                out.write(json.dumps(lines[-1]) + "\n")
            shutil.rmtree(folder / f"store-{number}", ignore_errors=True)
            print(f"store {number}{' on S3' if remote else ''}: {total} kills, 0 lost", file=sys.stderr, flush=True)
    finally:
        if server is not None:
            server.stop()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.exit(main(args.kills, args.folder, args.seed))
