"""The shards that a rank holds during an epoch: the plan says when each is first needed and when it has given its last
row, so whoever keeps something per sample leases and gives back without asking the method."""

from __future__ import annotations

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.state_store.leases import Leases


class LeasedShards:
    def __init__(self, leases: Leases, plan: EpochPlan, streams: range, start_step: int, what: str):
        """`what` fills them, for people."""
        outlook = plan.outlook(streams, start_step)
        if leases.slots.count < outlook.at_once:
            each = leases.slots.bytes_each(leases.schema) / 1e6
            raise UserError(
                f"train.state_budget_mb holds {leases.slots.count} shards of {what}, but this rank's {len(streams)} "
                f"streams lease {outlook.at_once} at a time (data.open_shards = {plan.open_shards}, and those a batch "
                f"opens). Raise train.state_budget_mb to {(outlook.at_once + len(streams)) * each:.1f}, lower "
                "data.open_shards, use more ranks, or make other shards."
            )
        self.leases, self.order, self.remaining = leases, outlook.order, outlook.remaining

    def new(self, planned: np.ndarray) -> list[int]:
        """Shards of a batch's samples that are not leased yet."""
        return [int(shard) for shard in np.unique(planned) if self.leases.slots.slot_of[shard] < 0]

    def take(self, planned: np.ndarray) -> None:
        """Before a batch: corrupt samples count too."""
        for shard in self.new(planned):
            self.leases.lease(shard)

    def give(self, planned: np.ndarray) -> None:
        """After it: shards that have given their last row go back."""
        self.remaining -= np.bincount(planned, minlength=len(self.remaining))
        for shard in np.unique(planned):
            if self.remaining[shard] == 0:
                self.leases.release(int(shard))
