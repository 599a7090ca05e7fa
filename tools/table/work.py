"""The work of a table: for every row its search, if it has one, then the chosen setting with every seed."""

from __future__ import annotations

import sys

from lacuna.tools.table.rows import RowWork
from lacuna.tools.trials.crew import CrewSettings, open_crew, work_through
from lacuna.tools.trials.job import Job, Outcome
from lacuna.tools.trials.ledger import Ledger, slim
from lacuna.tools.trials.readiness import Readiness
from lacuna.tools.trials.watching import Watching, all_epochs
from lacuna.trainer.config.sections import Config, parse_config

SEARCH_SEED = 0


def train_rows(rows: list[RowWork], out: str, seeds: range, settings: CrewSettings, train: bool = True) -> None:
    """Train what is not there yet, on Ray; the rows know afterwards what came of them."""
    ledger = Ledger(out)
    work = TableWork(rows, out, seeds, ledger, settings.ranks)
    missing = sum(row.missing is not None for row in rows)
    print(f"{len(rows) - missing} rows to train, {missing} whose data or weights are not there", file=sys.stderr,
          flush=True)
    work.replay()
    if train and work.unfinished:
        with (ledger.held(), open_crew(settings) as crew,
              Watching(out, work.epochs_left, work.summary, crew.slots) as watching):
            work_through(work, ledger, crew, watching)


class TableWork:
    """What `work_through` asks."""

    def __init__(self, rows: list[RowWork], out: str, seeds: range, ledger: Ledger, ranks: int = 1):
        self.rows, self.out, self.seeds, self.ledger, self.ranks = rows, out, seeds, ledger, ranks
        self.ready = Readiness()
        for row in rows:
            row.missing = self._why_not(row)
        self._jobs: dict[str, tuple[RowWork, int | None, int | None]] = {}  # label → row, candidate, seed

    def _why_not(self, row: RowWork) -> str | None:
        for i in range(len(row.candidates)):  # a misspelt key is a mistake in the table, not something missing
            row.config(self.out, "check", i, 0, True)
        return self.ready.why_not(parse_config(row.body, row.where))

    def begin(self) -> list[Job]:
        jobs = []
        for row in self.rows:
            if row.missing is None:
                jobs += [self._trial(row, i) for i in range(len(row.candidates))] or self._finals(row)
        return jobs

    def done(self, job: Job, outcome: Outcome) -> list[Job]:
        row, candidate, seed = self._jobs[job.label]
        if seed is not None:
            row.outcomes[seed], row.folders[seed] = outcome, job.config.folder
            return []
        assert candidate is not None
        row.tried[candidate] = outcome
        if len(row.tried) < len(row.candidates):
            return []
        row.choose()
        for i in range(len(row.candidates)):
            config = self._trial(row, i).config
            if i == row.chosen:
                row.chosen_folder = config.folder
            else:
                slim(config)
        return [] if row.chosen is None else self._finals(row)

    def replay(self) -> None:
        """Take note of what the ledger has, without training."""
        jobs = self.begin()
        while jobs:
            job = jobs.pop(0)
            outcome = self.ledger.outcome(job)
            if outcome is not None:
                jobs = self.done(job, outcome) + jobs

    @property
    def unfinished(self) -> bool:
        """Whether anything is left to train."""
        return any(row.missing is None and len(row.outcomes) < len(self.seeds) for row in self.rows)

    def epochs_left(self, jobs: list[Job]) -> float:
        """Of jobs that are known of, and of the seeds that follow a search."""
        later = sum(len(self.seeds) * all_epochs(parse_config(row.body, row.where)) for row in self.rows
                    if row.candidates and row.chosen is None and row.missing is None)
        return sum(all_epochs(job.config) for job in jobs) + later

    def summary(self) -> str:
        return f"{sum(len(row.outcomes) == len(self.seeds) for row in self.rows)} of {len(self.rows)} rows are done."

    def _trial(self, row: RowWork, candidate: int) -> Job:
        part = f"try-{candidate:02d}"
        config = row.config(self.out, part, candidate, SEARCH_SEED, test=False)
        return self._job(f"{row.name}.{part}", config, row, candidate, None)

    def _finals(self, row: RowWork) -> list[Job]:
        jobs = []
        for seed in self.seeds:
            # With the search's seed it has been trained already: all that is left of it is the test.
            part = f"try-{row.chosen:02d}" if row.chosen is not None and seed == SEARCH_SEED else f"seed-{seed}"
            config = row.config(self.out, part, row.chosen, seed, test=True)
            jobs.append(self._job(f"{row.name}.seed-{seed}", config, row, None, seed))
        return jobs

    def _job(self, name: str, config: Config, row: RowWork, candidate: int | None, seed: int | None) -> Job:
        job = Job(name, config, key=self.ready.key(config), ranks=self.ranks)
        self._jobs[job.label] = (row, candidate, seed)
        return job
