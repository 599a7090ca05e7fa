"""What the caches of a run's phases take, and whether they fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store.slots import Slots
from lacuna.trainer.cache.cost import bytes_there, cost_problem
from lacuna.trainer.cache.phase_cache import Views, cut_of, fixed_part
from lacuna.trainer.cache.views import View
from lacuna.trainer.config.sections import Config
from lacuna.trainer.methods.base import Needs
from lacuna.trainer.models.classifier import Classifier


@dataclass(frozen=True)
class PlannedCache:
    """Of one phase; its weights are those that the run begins with, so what is there already is a guess if they learn
    before."""

    config: Config
    phase: int
    views: list[View]

    def facts(self) -> dict:
        first = self.views[0]
        return {"phase": self.config.phases[self.phase].name, "cut": first.facts["cut"], "shape": first.facts["shape"],
                "views": len(self.views), "bytes_per_sample": first.row.itemsize,
                "bytes": sum(view.bytes for view in self.views), "bytes_there": sum(map(bytes_there, self.views))}

    def problems(self, plan: EpochPlan, ranks: int) -> list[str]:
        found = [problem] if (problem := cost_problem(self.config, self.phase, self.views)) else []
        each, needed = Slots.bytes_each(self.views[0].schema), plan.outlook(plan.rank_streams(0, ranks)).at_once
        budget = self.config.train.state_budget_mb
        if budget * 2**20 < needed * each:
            found.append(f"train.state_budget_mb = {budget:g} holds {int(budget * 2**20 // each)} shards of what phase "
                         f"{self.config.phases[self.phase].name!r} caches, a rank leases {needed} at a time: raise it "
                         f"to {math.ceil(needed * each / 2**20)}, lower data.open_shards, use more ranks or make "
                         "smaller shards.")
        return found


def planned_caches(config: Config, sources: dict[str, ShardSource], model: Classifier,
                   needs: Needs) -> list[PlannedCache]:
    found = []
    for number, phase in enumerate(config.phases):
        if phase.cache is not None:
            model.cut = cut_of(model, config, number, needs)
            views = Views(config, fixed_part(model, config), phase.cache, needs).all_of(sources, phase.epochs)
            found.append(PlannedCache(config, number, views))
    return found
