"""train.group_weight: puts the term of the samples' groups beside a run's method."""

from __future__ import annotations

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.groups import Groups
from lacuna.data_pipelines.labels import POSITIVE
from lacuna.data_pipelines.source import ShardSource
from lacuna.trainer.config.sections import Config
from lacuna.trainer.methods.base import Method
from lacuna.trainer.methods.grouped import Grouped, first_averages


def with_groups(method: Method, config: Config, source: ShardSource) -> Method:
    """The method itself, unless a weight is given."""
    train, name = config.train, config.data.train.groups
    if not train.group_weight:
        return method
    if name is None:
        raise UserError(f"train.group_weight = {train.group_weight} needs data.train.groups: the name of groups that "
                        "`lacuna annotate … --scheme groups` made.")
    groups = Groups.load(source.index, name)
    known = [_positives(source, shard, numbers) for shard, numbers in enumerate(groups.by_shard)]
    averages = first_averages(groups.count, known, source.classes, train.group_start, config.seed)
    return Grouped(method, groups.by_shard, averages, train.group_weight, train.group_rate)


def groups_fingerprint(config: Config, source: ShardSource) -> dict[str, str]:
    """What a checkpoint depends on."""
    name = config.data.train.groups
    return {"data.train groups": Groups.load(source.index, name).fingerprint} if name and (
        config.train.group_weight) else {}


def _positives(source: ShardSource, shard: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(groups, classes) of what is annotated in the rows that take part."""
    there = source.sidecar.labels(shard).dense(source.classes) == POSITIVE
    if source.subset is not None:
        there[~source.subset.mask(shard)] = False
    rows, classes = np.nonzero(there)
    return numbers[rows], classes
