"""The table of scores for methods that want a vision-language model's: here of a classifier on the same labels.

AN, which learned one positive per image, gives an image about one positive in all, as a softmax over the classes does,
so the published thresholds have a meaning. What such methods gain from a model that saw other data, they cannot gain
here.
"""

from __future__ import annotations

import os

import numpy as np

from lacuna import state_store
from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store.fields import Field
from lacuna.state_store.moving import BulkWriter
from lacuna.tools.import_scores import SNAPSHOT, new_store
from lacuna.tools.passes.scoring import on_this_device
from lacuna.tools.passes.trained import Trained


def is_table(url: str) -> bool:
    """Whether one is there and whole: a killed writing leaves a store without a snapshot."""
    return os.path.exists(os.path.join(url, "zarr.json")) and bool(state_store.open(url).snapshots())


def write_table(url: str, trained: Trained, source: ShardSource) -> None:
    """Scores of a trained classifier for every sample, as `lacuna import-scores` stores them."""
    model = on_this_device(trained, source)
    writer = BulkWriter(new_store(url, source.index, [Field("scores", (source.classes,), "float16")]))
    for shard, count in enumerate(source.index.counts):
        values = np.zeros((count, source.classes), np.float16)
        scores, facts = model.scores(shard)
        values[facts["rows"]] = scores
        writer.write("scores", shard, values)
    writer.commit(SNAPSHOT, {"teacher": os.path.basename(os.path.dirname(trained.run))})
