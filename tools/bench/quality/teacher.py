"""The table of scores for methods that want a vision-language model's: here of a classifier on the same labels.

AN, which learned one positive per image, gives an image about one positive in all, as a softmax over the classes does,
so the published thresholds have a meaning. What such methods gain from a model that saw other data, they cannot gain
here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import torch

from lacuna import state_store
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.stream import Batch
from lacuna.state_store.fields import Field
from lacuna.state_store.moving import BulkWriter
from lacuna.tools.import_scores import SNAPSHOT, new_store
from lacuna.trainer import whole_run
from lacuna.trainer.evaluate import EVAL_BATCH, eval_stream
from lacuna.trainer.methods import score_of


def scored(run: whole_run.Run, source: ShardSource) -> Iterator[tuple[Batch, torch.Tensor]]:
    """Every sample once with its scores [B, L], by the weights that were tested."""
    plan = EpochPlan(source.rows, 0, 0, 1, EVAL_BATCH, open_shards=1, shuffle=False)
    score = score_of(run.config.method)
    run.model.eval()
    with eval_stream(source, plan, run.config, run.world) as stream, torch.no_grad():
        for batch in stream:
            yield batch, score(run.model(batch.inputs)[0])


def is_table(url: str) -> bool:
    """Whether one is there and whole: a killed writing leaves a store without a snapshot."""
    return os.path.exists(os.path.join(url, "zarr.json")) and bool(state_store.open(url).snapshots())


def write_table(url: str, run: whole_run.Run, source: ShardSource) -> None:
    """Probabilities of the run's classifier for every sample, as `lacuna import-scores` stores them."""
    writer = BulkWriter(new_store(url, source.index, [Field("scores", (source.classes,), "float16")]))
    rows = [np.zeros((count, source.classes), np.float16) for count in source.index.rows]
    for batch, scores in scored(run, source):
        for shard in np.unique(batch.shards):
            here = batch.shards == shard
            rows[shard][batch.rows[here]] = scores.half().numpy()[here]
    for shard, values in enumerate(rows):
        writer.write("scores", shard, values)
    writer.commit(SNAPSHOT, {"teacher": os.path.basename(run.config.folder)})
