"""One row of a table on its way: its candidates, what was chosen, and what every seed came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lacuna.basics import storage
from lacuna.tools.trials.job import Outcome, placed
from lacuna.trainer.config.files import Change, changed
from lacuna.trainer.config.sections import Config
from lacuna.trainer.config.tables import Numbers, Row

# How papers call what training measures: (set, measure).
MEASURES = {"mAP": ("test", "map_skip_empty"), "validation mAP": ("val", "map_skip_empty"),
            "mAP(C)": ("test", "map_csl_c"), "mAP(O)": ("test", "map_csl_o"), "mF1": ("test", "best_mf1")}

@dataclass
class RowWork:
    name: str
    row: Row
    body: dict
    candidates: list[dict[str, Any]]  # settings by their keys; none: the row as it stands
    where: str  # how the reader of an error knows it
    missing: str | None = None
    tried: dict[int, Outcome] = field(default_factory=dict)
    chosen: int | None = None
    chosen_folder: str = ""  # the run of the search that won
    outcomes: dict[int, Outcome] = field(default_factory=dict)  # by seed
    folders: dict[int, str] = field(default_factory=dict)  # runs of the seeds

    def config(self, out: str, part: str, candidate: int | None, seed: int, test: bool) -> Config:
        """Of a candidate (None: the row as it stands). Without a test set a run cannot read it."""
        body = changed(self.body, as_changes(self.candidates[candidate] if candidate is not None else {}, self.where))
        config = placed({**body, "seed": seed}, storage.join(out, "runs", self.name), part, self.where)
        return config if test else config.model_copy(update={"data": config.data.model_copy(update={"test": None})})

    def choose(self) -> None:
        """By validation mAP; of equals the first. One that diverged after a good epoch would do so again."""
        scored = {i: outcome.score for i, outcome in self.tried.items()
                  if outcome.score is not None and outcome.status != "failed"}
        if scored:
            self.chosen = max(sorted(scored), key=lambda i: scored[i])  # type: ignore[arg-type, return-value]
        else:
            self.missing = f"every setting of the search failed; the first: {self.tried[0].reason}"

    def numbers(self) -> dict[str, list[float]]:
        """name → one number per seed that was finished; names as the paper has them."""
        names = list(self.row.reported) if isinstance(self.row.reported, dict) else ["mAP"]
        found: dict[str, list[float]] = {}
        for name in names:
            split, measure = MEASURES.get(name, ("", ""))
            values = [o.results[split][measure] for _, o in sorted(self.outcomes.items())
                      if measure in o.results.get(split, {})]
            if values:
                found[name] = values
        return found

    def as_dict(self, seeds: range) -> dict[str, Any]:
        numbers, single = self.numbers(), reported_numbers(self.row.reported)
        ours = {name: {"mean": round(float(np.mean(v)), 3), "std": round(float(np.std(v)), 3), "each": v}
                for name, v in numbers.items()}
        differences = {name: round(float(np.mean(v)) - single[name], 3) for name, v in numbers.items()
                       if name in single}
        finished = [seed for seed, outcome in sorted(self.outcomes.items()) if outcome.status == "finished"]
        return {"row": self.name, "ours": ours, "reported": self.row.reported, "difference": differences,
                "seeds": finished, "chosen": self.candidates[self.chosen] if self.chosen is not None else None,
                "tried": len(self.tried), "missing": self._lacking(seeds, finished), "note": self.row.note}

    def _lacking(self, seeds: range, finished: list[int]) -> str | None:
        if self.missing:
            return self.missing
        failed = {seed: outcome.reason for seed, outcome in self.outcomes.items() if outcome.status == "failed"}
        if failed:
            return "; ".join(f"seed {seed} failed: {reason}" for seed, reason in sorted(failed.items()))
        left = [seed for seed in seeds if seed not in finished]
        return f"not trained yet: seeds {', '.join(map(str, left))}" if left else None


def as_changes(settings: dict[str, Any], where: str) -> list[Change]:
    return [(key.split("."), value, f"{where}: search {key}") for key, value in settings.items()]


def reported_numbers(reported: Numbers | None) -> dict[str, float]:
    """Those that are one number each, by name; a plain one is the test mAP."""
    if reported is None:
        return {}
    named = reported if isinstance(reported, dict) else {"mAP": reported}
    return {name: value for name, value in named.items() if not isinstance(value, list)}
