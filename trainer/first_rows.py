"""What a run's samples start from, for fields whose first values the method makes of the labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store import Field, Given
from lacuna.state_store.store import Initials
from lacuna.trainer.assemble import load_sources, place_model, task_of
from lacuna.trainer.config.sections import Config
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Method
from lacuna.trainer.world import World


@dataclass(frozen=True)
class FirstRows:
    """function(shard) → rows of one field; small enough to be sent to other processes, built when first asked."""

    config: Config
    field: str

    def __call__(self, shard: int) -> np.ndarray:
        method, source = _built(self.config.model_dump_json())
        return method.initial_rows(self.field, source.sidecar.labels(shard).dense(source.classes), shard)


def first_rows(config: Config, fields: Mapping[str, Field]) -> Initials:
    """Of those fields of a run's store whose first values its method makes of the labels."""
    return {name: FirstRows(config, name) for name, field in fields.items() if isinstance(field.initial, Given)}


@lru_cache(maxsize=2)
def _built(config_json: str) -> tuple[Method, ShardSource]:
    config = Config.model_validate_json(config_json)
    # The weights play no part: what a method starts from depends on the labels and the shape of the model.
    config = config.model_copy(update={"model": config.model.model_copy(update={"weights": "none"})})
    sources = load_sources(config)
    with torch.random.fork_rng([]):
        model = place_model(config, sources["train"], World(torch.device("cpu")))
    return build_method(config.method, task_of(config, sources, model)), sources["train"]
