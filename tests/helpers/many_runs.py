"""Several runs one after another in one launch, since starting ranks is what takes time.

`many_runs.py JOBS.json`: a list of {"config": …, "leave": step, "kill": step, "record": bool}. A run that is
left stops dead before that step, without closing anything; `kill` ends the whole launch there by SIGKILL. `record`
writes the scores at the start of every epoch and which entries were selected, beside the run's other files.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

from lacuna.basics import storage
from lacuna.trainer import loop, whole_run, world
from lacuna.trainer.assemble import build_run
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.state_rows import StateRows
from lacuna.trainer.whole_run import Run

_STEP, _SELECTED = loop.take_step, StateRows.selected


class Left(Exception):
    pass


def main(path: str) -> None:
    joined = world.start(120)
    watchdog = world.Watchdog(joined, 120)
    for job in json.loads(Path(path).read_text()):
        run = build_run(parse_config(job["config"], path), joined, watchdog)
        interrupt(job.get("leave"), job.get("kill"))
        seen: list[tuple] = []
        if job.get("record"):
            record(run, seen)
        try:
            results = whole_run.train(run)
        except Left:
            continue
        finally:
            StateRows.selected = _SELECTED
            if seen:
                keep(run, seen)
        if joined.main:
            storage.write_atomic(os.path.join(run.config.folder, "results.json"), json.dumps(results).encode())
        run.run_log.close()
        run.state.close()
        joined.barrier()


def interrupt(leave: int | None, kill: int | None) -> None:
    def step(phase, batch, position):
        if position.total_steps == leave:
            raise Left
        if position.total_steps == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return _STEP(phase, batch, position)

    loop.take_step = step


def record(run: Run, seen: list[tuple]) -> None:
    """Scores as the store has them when an epoch begins (on rank 0), and every selection that a loss asks for."""
    begin = run.method.begin_epoch

    def begin_epoch(start):
        if run.world.main:
            shards = range(len(run.sources["train"].index.shards))
            scores = np.concatenate([run.state.session.read_shard("score", s) for s in shards])
            np.save(os.path.join(run.config.folder, f"scores-{start.overall}.npy"), scores)
        begin(start)

    def selected(self, field, cutoffs):
        chosen = _SELECTED(self, field, cutoffs)
        seen.append((self._rows._session.epoch, self._rows.shards, self._rows.rows, chosen.numpy()))
        return chosen

    run.method.begin_epoch, StateRows.selected = begin_epoch, selected


def keep(run: Run, seen: list[tuple]) -> None:
    epochs = np.concatenate([np.full(len(rows), epoch) for epoch, _, rows, _ in seen])
    parts = [np.concatenate([entry[i] for entry in seen]) for i in (1, 2, 3)]
    np.savez(os.path.join(run.config.folder, f"selected-{os.getpid()}.npz"), epochs=epochs, shards=parts[0],
             rows=parts[1], chosen=parts[2])


if __name__ == "__main__":
    main(next(arg for arg in sys.argv[1:] if not arg.startswith("--")))
    sys.stdout.flush()
    os._exit(0)
