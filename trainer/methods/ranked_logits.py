"""A logit per entry in the store, ranked per class over all samples; 0 is an entry that no pass has scored."""

from __future__ import annotations

import numpy as np

from lacuna.state_store import Field
from lacuna.trainer.methods.base import Task

LARGEST = 30.0  # logits are kept within ±30 in the store
APART = 32.0  # what is added or taken away to keep scored entries apart from those at 0


def score_field(task: Task) -> Field:
    return Field("score", (task.classes,), "uint16", range=(-64.0, 64.0), histogram=True)


def first_counts(task: Task) -> dict[str, np.ndarray]:
    """Histograms of a store in which every entry that can be ranked starts at 0, mid-range."""
    counts = np.zeros((task.classes, 256), dtype=np.int64)
    counts[:, 128] = task.samples - task.negatives
    return {"score": counts}
