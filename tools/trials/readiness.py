"""Whether a config can be trained here, before anything is started: its data, its weights, what its method needs."""

from __future__ import annotations

import hashlib
import json

from lacuna.basics.errors import UserError
from lacuna.basics.refusals import refusal
from lacuna.data_pipelines.source import ShardSource
from lacuna.trainer.assemble import check_method, load_sources, task_on
from lacuna.trainer.config.data_section import DataConfig
from lacuna.trainer.config.sections import Config, ModelConfig
from lacuna.trainer.methods import build_method
from lacuna.trainer.methods.base import Task

_GRID, _WIDTH = 7, 8  # that a method's needs do not depend on


class Readiness:
    """Looks at each dataset and each backbone once, however many configs share them."""

    def __init__(self) -> None:
        self._data: dict[str, dict[str, ShardSource] | str] = {}
        self._tasks: dict[str, Task] = {}
        self._backbones: dict[str, str | None] = {}

    def why_not(self, config: Config) -> str | None:
        """What is missing, in one sentence; None if nothing is."""
        sources = self._sources(config)
        if isinstance(sources, str):
            return f"dataset not there: {sources}"
        weights = self._weights(config.model, config.data, sources["train"])
        if weights is not None:
            return f"weights not there: {weights}"
        try:
            check_method(config, build_method(config.method, self._task(config, sources)))
        except UserError as error:
            return str(error)
        return None

    def key(self, config: Config) -> str:
        """Names everything that the numbers of a run depend on; of data that are there."""
        facts: list = [config.fingerprint(), [phase.epochs for phase in config.phases],
                       config.data.test and config.data.test.model_dump(exclude={"url"})]
        sources = self._sources(config)
        assert not isinstance(sources, str), sources
        for name, source in sources.items():
            facts += [name, source.index.fingerprint, source.sidecar.fingerprint,
                      source.subset and source.subset.fingerprint]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]

    def _sources(self, config: Config) -> dict[str, ShardSource] | str:
        data = config.data
        key = json.dumps([split and split.model_dump() for split in
                          (data.train, data.val, data.test, data.fully_labelled)])
        if key not in self._data:
            try:
                self._data[key] = load_sources(config)
            except (UserError, OSError) as error:
                self._data[key] = refusal(error) or str(error)
        return self._data[key]

    def _task(self, config: Config, sources: dict[str, ShardSource]) -> Task:
        key = json.dumps([id(sources), config.model.expected_positives, config.seed])
        if key not in self._tasks:
            grid = _GRID if sources["train"].index.kind == "image" else 0
            self._tasks[key] = task_on(config, sources, grid, sources["train"].feature_width or _WIDTH)
        return self._tasks[key]

    def _weights(self, model: ModelConfig, data: DataConfig, train: ShardSource) -> str | None:
        if model.backbone == "features":
            return None
        key = json.dumps([model.model_dump(), data.image_size, train.classes])
        if key not in self._backbones:
            self._backbones[key] = _built(model, data, train)
        return self._backbones[key]


def _built(model: ModelConfig, data: DataConfig, train: ShardSource) -> str | None:
    from lacuna.trainer.models.classifier import build_model

    try:
        build_model(model, data, train.classes, train.feature_width)
    except (UserError, OSError) as error:
        return refusal(error) or str(error)
    return None
