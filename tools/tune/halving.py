"""Successive halving: all trials of a bracket train to its first rung, the best part of them goes on to the next.

A decision is made when all trials of a rung are in, by their scores in the order of their numbers. So it does not
depend on the number of workers, on who was first, or on how often the search was interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lacuna.tools.trials.job import Outcome
from lacuna.trainer.config.sections import Config


def rung_parts(trials: int, epochs: int, first: int, factor: int) -> list[int]:
    """What a trial's whole length is divided by at every rung: [9, 3, 1]."""
    parts = [1]
    while factor > 1 and trials >= factor ** len(parts) and epochs >= first * factor ** len(parts):
        parts.append(factor ** len(parts))
    return parts[::-1]


def evaluated_at(config: Config) -> list[int]:
    """Epochs, over all phases, after which a run is evaluated."""
    found, before = [], 0
    for phase in config.phases:
        found += [before + epoch for epoch in range(1, phase.epochs + 1)
                  if epoch % config.train.eval_every == 0 or epoch == phase.epochs]
        before += phase.epochs
    return found


def rung_epochs(config: Config, part: int, first: int) -> int:
    """Where a trial pauses: after the first evaluation at or behind that part of its length; 0: it goes to its end."""
    ends = evaluated_at(config)
    wanted = max(first, -(-ends[-1] // part))
    reached = next(end for end in ends if end >= min(wanted, ends[-1]))
    return 0 if reached == ends[-1] else reached


@dataclass
class Bracket:
    """Some trials of one method, rung by rung."""

    parts: list[int]
    factor: int
    alive: list[int]  # trial numbers at this rung
    rung: int = 0
    scores: dict[int, float] = field(default_factory=dict)  # at this rung
    reported: set[int] = field(default_factory=set)

    @property
    def over(self) -> bool:
        return not self.alive or self.rung == len(self.parts)

    def report(self, trial: int, outcome: Outcome) -> list[int] | None:
        """None until all of the rung are in; then those that go on (their rung is the next one)."""
        self.reported.add(trial)
        if outcome.status != "failed" and outcome.score is not None:
            self.scores[trial] = outcome.score
        if len(self.reported) < len(self.alive):
            return None
        ranked = sorted(self.scores, key=lambda number: (-self.scores[number], number))
        self.rung += 1
        if self.rung == len(self.parts):
            self.alive = []
        else:
            self.alive = sorted(ranked[: max(1, len(self.alive) // self.factor)])
        self.scores, self.reported = {}, set()
        return self.alive
