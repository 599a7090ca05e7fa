"""A pass over all training samples between two epochs, for methods that decide something about every sample at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from lacuna.data_pipelines.plan import EpochPlan
from lacuna.trainer.evaluate import autocast, model_inputs
from lacuna.trainer.methods.base import Outputs, Scored
from lacuna.trainer.on_device.uploads import beside

if TYPE_CHECKING:
    from lacuna.trainer.whole_run import Run


def scored(run: Run, plan: EpochPlan, overall: int) -> Iterator[Scored]:
    """This rank's samples in the order of the coming epoch: the same shards are leased, within the same budget.

    A run that is killed inside takes the whole pass again: nothing of it is committed before the next checkpoint.
    """
    world, source = run.world, run.sources["train"]
    was_training = run.model.training
    run.model.eval()
    needs = run.method.needs()
    run.state.begin_epoch(plan, 0, overall)
    with run.cache.evaluation(source, plan) as stream, torch.no_grad():
        for batch in stream:
            run.watchdog.beat("scoring the training samples")
            with run.state.step(batch) as rows:
                if len(batch):
                    inputs = model_inputs(batch.inputs, run.config, world)
                    with autocast(run.config, world):
                        outputs = Outputs(*run.model(inputs, with_maps=needs.maps, of_classes=needs.class_features))
                    batch.moved_from, batch.labels = batch.labels, beside(batch.labels, world.device)
                    yield Scored(batch, outputs, rows)
    run.state.end_epoch()
    run.model.train(was_training)
