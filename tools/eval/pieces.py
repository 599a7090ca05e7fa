"""Where pieces come from: the part files of a Ray pass over shards, or a prediction file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.eval.measure import Piece
from lacuna.tools.eval.predictions import Predictions, batches
from lacuna.tools.eval.truth import Truth, validation_number
from lacuna.tools.passes.parts import Parts
from lacuna.tools.passes.scoring import bad_of, shard_rows
from lacuna.tools.passes.tables import TableParts
from lacuna.trainer.evaluate import judge_bad


def from_parts(parts: Parts | TableParts, source: ShardSource, most_bad: float,
               real: Truth | None = None) -> Iterator[Piece]:
    """Shard after shard; `real` replaces the sidecar's labels by those of the image's validation number."""
    first = source.index.counts.cumsum() - source.index.counts
    bad = []
    for shard, part in parts.read_all(list(shard_rows(source))):
        bad += bad_of(part)
        rows = part["rows"]
        if not len(rows):
            continue
        ordinals = first[shard] + rows
        if real is None:
            targets = source.sidecar.labels(shard).dense(source.classes, rows)
            yield Piece(part["scores"], targets, ordinals)
        else:
            keys = source.index.members(shard).keys
            chosen = np.array([_number(keys[row], len(real.keys), source.index.shard_url(shard)) for row in rows]) - 1
            originals = None if real.originals is None else real.originals[chosen]
            yield Piece(part["scores"], real.labels.dense(source.classes, chosen), ordinals, originals)
    judge_bad(bad, int(source.counts.sum()), most_bad, source.index.url)


def from_predictions(predictions: Predictions, truth: Truth, rows: np.ndarray) -> Iterator[Piece]:
    """rows int64 [N]: the truth's sample of every row of the predictions."""
    classes = len(truth.classes)
    for some in batches(len(predictions)):
        chosen = rows[some]
        originals = None if truth.originals is None else truth.originals[chosen]
        # Below every listed class, also one with score 0: only AP counts an unlisted class as 0.
        ranked = predictions.dense(some, classes, absent=-1.0) if predictions.truncated else None
        yield Piece(predictions.dense(some, classes), truth.labels.dense(classes, chosen), chosen, originals, ranked)


def _number(key: str, count: int, where: str) -> int:
    number = validation_number(key)
    if number is None or not 1 <= number <= count:
        raise UserError(f"{where}: sample {key!r} is none of the {count:,} ImageNet validation images of --real "
                        "(ILSVRC2012_val_00000001, …).")
    return number
