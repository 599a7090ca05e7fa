"""Jobs for the tests of passes; in a file of its own, because Ray's workers import it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.tools.passes.pool import Job


@dataclass(frozen=True)
class Squares:
    """Cheap: shard → its square. `fail` and `refuse` name shards that die or are refused."""

    log: str = ""  # file that gets a line for every shard done
    dies: int = -1
    refuses: int = -1
    builds: bool = True
    fingerprint: str = "squares"

    def build(self) -> Callable[[int], dict[str, np.ndarray]]:
        if not self.builds:
            raise UserError("model.backbone = 'x': no such backbone.")
        return self.work

    def work(self, shard: int) -> dict[str, np.ndarray]:
        if shard == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        if shard == self.refuses:
            raise UserError(f"shard {shard}: truncated.")
        if self.log:
            with open(self.log, "a") as f:
                f.write(f"{shard}\n")
        return {"square": np.array(shard * shard)}


@dataclass(frozen=True)
class KilledOnce:
    """A real job whose worker is killed by SIGKILL in the middle of a shard, the first time it is there."""

    job: Job
    shard: int
    flag: str  # file that says that it has happened

    @property
    def fingerprint(self) -> str:
        return self.job.fingerprint

    def build(self) -> Callable[[int], dict[str, np.ndarray]]:
        work = self.job.build()

        def interrupted(shard: int):
            found = work(shard)
            if shard == self.shard and not Path(self.flag).exists():
                Path(self.flag).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return found

        return interrupted
