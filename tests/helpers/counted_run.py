"""A training run that counts itself: `counted_run.py FILE ARGUMENTS OF run.py …`.

After every step and before state is collected it appends a JSON line to FILE: step, bytes read and written so far and
peak memory as the kernel counts them, bytes of state on disk. What looks from outside sees as much as it gets of the
processor.
"""

from __future__ import annotations

import json
import os
import sys

from lacuna.basics.process_memory import peak_resident_bytes
from lacuna.trainer import run
from lacuna.trainer.run_log import RunLog
from lacuna.trainer.whole_run import SampleState

PROGRESS, COLLECT = RunLog.progress, SampleState.collect
step = 0


def note(state: str | None) -> None:
    with open("/proc/self/io", encoding="ascii") as f:
        counters = {name: int(value) for name, value in (line.split(": ") for line in f)}
    chunks = os.path.join(state, "chunks") if state else None
    disk = sum(os.path.getsize(os.path.join(base, name)) for base, _, names in os.walk(chunks) for name in names
               ) if chunks else 0
    line = {"step": step, "disk": disk, "peak": peak_resident_bytes(), "rchar": counters["rchar"],
            "wchar": counters["wchar"]}
    with open(sys.argv[1], "a", encoding="utf-8") as f:
        f.write(json.dumps(line) + "\n")


def progress(self, text, report):
    global step
    step += 1
    PROGRESS(self, text, report)
    note(None)


def collect(self, *args, **kwargs):
    note(self.store.url)
    return COLLECT(self, *args, **kwargs)


if __name__ == "__main__":
    RunLog.progress, SampleState.collect = progress, collect
    code = run.main(sys.argv[2:])
    sys.stdout.flush()
    os._exit(code)
