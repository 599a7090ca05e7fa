"""The table of scores for methods that want a vision-language model's: here of an AN classifier on the same labels.

A classifier that learned one positive per image gives an image about one positive in all, as a softmax over the classes
does, so the published thresholds have a meaning. What such methods gain from a model that saw other data, they cannot
gain here.
"""

from __future__ import annotations

import os
import shutil

import numpy as np
import torch

from data_pipelines.plan import EpochPlan
from data_pipelines.source import ShardSource
from state_store.fields import Field
from state_store.moving import BulkWriter
from tools.import_scores import SNAPSHOT, new_store
from trainer import loop
from trainer.evaluate import EVAL_BATCH, eval_stream


def write_table(url: str, run: loop.Run, source: ShardSource) -> None:
    """Probabilities of the run's classifier for every sample, as `lacuna import-scores` stores them."""
    shutil.rmtree(url, ignore_errors=True)  # left by one that was killed
    writer = BulkWriter(new_store(url, source.index, [Field("scores", (source.classes,), "float16")]))
    plan = EpochPlan(source.rows, 0, 0, 1, EVAL_BATCH, open_shards=1, shuffle=False)
    rows = [np.zeros((count, source.classes), np.float16) for count in source.index.rows]
    run.model.eval()
    with eval_stream(source, plan, run.config, run.world) as stream, torch.no_grad():
        for batch in stream:
            scores = torch.sigmoid(run.model(batch.inputs)[0]).half().numpy()
            for shard in np.unique(batch.shards):
                here = batch.shards == shard
                rows[shard][batch.rows[here]] = scores[here]
    for shard, values in enumerate(rows):
        writer.write("scores", shard, values)
    writer.commit(SNAPSHOT, {"teacher": os.path.basename(run.config.folder)})
