"""What a run's phases cached of a dataset, where passes over it would push the same images through the backbone."""

from __future__ import annotations

import os

import torch

from lacuna.basics import storage
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.passes.trained import Trained, load_model
from lacuna.trainer.cache.phase_cache import Views, cut_of, fixed_part
from lacuna.trainer.cache.views import FACTS, View
from lacuna.trainer.methods import METHODS, example
from lacuna.trainer.models.classifier import Classifier


def cached_view(trained: Trained, source: ShardSource, model: Classifier | None = None) -> View | None:
    """The view of evaluation that the last phase with a cache left, with the model's cut set to it; None: there is
    none of this model's weights."""
    config = trained.config.model_copy(update={"run_folder": os.path.dirname(trained.run.rstrip("/")) or "."})
    numbers = [number for number, phase in enumerate(config.phases) if phase.cache is not None]
    if not numbers or config.method["name"] not in METHODS or source.index.kind != "image":
        return None
    model = model or load_model(trained, source, torch.device("cpu"))
    needs, settings = example(config.method["name"]).needs(), config.phases[numbers[-1]].cache
    assert settings is not None
    model.set_trainable(config.phases[numbers[-1]].trainable)
    model.cut = cut_of(model.eval(), config, numbers[-1], needs)
    view = Views(config, fixed_part(model, config), settings, needs).evaluation(source)
    if storage.exists(storage.join(view.url, FACTS)):
        return view
    model.cut = None
    return None
