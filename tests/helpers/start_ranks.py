"""Starts the ranks of a launch as DeepSpeed's launcher does, which first imports torch twice.

  python start_ranks.py RANKS PORT SCRIPT [ARGUMENT …]
When a rank fails the others are ended, and SIGTERM is passed on. That the launcher itself works with ours is seen where
faults are tested, in the drill, across nodes and by the demo.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time


def main(ranks: int, port: str, script: str, *arguments: str) -> int:
    group = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    children = [subprocess.Popen([sys.executable, "-u", script, f"--local_rank={rank}", *arguments],
                                 env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                for rank in range(ranks)]

    def tell(number: int) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    signal.signal(signal.SIGTERM, lambda number, frame: tell(number))
    while None in (codes := [child.poll() for child in children]) and not any(codes):
        time.sleep(0.05)
    if None not in codes:
        return max(map(abs, codes))  # type: ignore[arg-type]
    first = next(code for code in codes if code)
    tell(signal.SIGTERM)
    end = time.monotonic() + 60
    while any(child.poll() is None for child in children) and time.monotonic() < end:
        time.sleep(0.05)
    tell(signal.SIGKILL)
    return abs(first)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
