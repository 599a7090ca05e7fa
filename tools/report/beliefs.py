"""What a run believed about the labels of its training samples, at every kept snapshot or checkpoint.

Beliefs are probabilities [n, L]: what the state store remembers (running scores, or ROLE's label estimates as last
written), or the scores of a checkpoint's model. With the full labels at hand they are compared with the truth.
Legend: n samples, L classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import Sidecar
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store.fields import Field
from lacuna.state_store.store import StateStore
from lacuna.tools.report.findings import Surest, pictures_of
from lacuna.tools.report.recorded_run import Lacks, RecordedRun, full_labels
from lacuna.tools.run_files import each_kept, step_of
from lacuna.trainer.metrics.measures import average_precision

BINS = 20
SURE = 0.9
_MOST_ENTRIES = 50_000_000  # 200 MB of beliefs at a time
# Fields that hold a number for every class, and what they are.
_SOURCES = {"score": "running scores of the state store", "phi": "label estimates σ(φ) as last written"}


@dataclass(frozen=True)
class View:
    """One moment of training; `shard(s)` gives the beliefs about the shard's rows that take part, and those rows."""

    step: int
    shard: Callable[[int], tuple[np.ndarray, np.ndarray] | None]


@dataclass(frozen=True)
class Views:
    """All moments that a run keeps; they are opened one at a time, since the run may still be written."""

    origin: str
    names: Callable[[], list[str]]  # of snapshots or checkpoints, oldest first
    view: Callable[[str], View]


def beliefs_of(folder: RecordedRun, full_name: str, samples: int, score: bool, lacks: Lacks) -> dict[str, Any] | None:
    source = folder.train
    if source is None:
        return None
    full = full_labels(source, full_name)
    unobserved = "distribution for unobserved positives, label recovery"
    if full is None:
        lacks(unobserved, f"the training set has no full labels (no sidecar {full_name!r} without unknown entries).")
    elif full.fingerprint == source.sidecar.fingerprint:
        lacks(unobserved, "it was trained with the full labels: nothing is unobserved.")
        full = None
    views = _views(folder, source, score, lacks)
    if views is None or not views.names():
        return None
    chosen = spread_shards(source, min(samples, max(1, _MOST_ENTRIES // source.classes)))
    taken = each_kept(views.names, lambda name: _look(views.view(name), source, full, chosen))
    moments = [{"step": step_of(name), **facts} for name, facts in taken.items() if facts]
    if not moments:
        lacks("beliefs about training labels", "no shard of the state was ever written.")
        return None
    last = moments[-1]
    frequency = [{"name": name, "estimated": a, "true": b} for name, a, b in zip(
        source.index.classes, last["estimated"], last["true"], strict=True)]
    pictures = pictures_of(folder, last["surest"], lacks)
    for moment in moments:
        del moment["estimated"], moment["true"], moment["surest"]
    return {"origin": views.origin, "samples": last["samples"], "full": full is not None, "moments": moments,
            "frequency": frequency, "pictures": pictures}


def spread_shards(source: ShardSource, samples: int) -> list[int]:
    """Shards with about so many samples, evenly over the set."""
    there = np.flatnonzero(source.counts)
    count = int(np.ceil(samples / max(1.0, float(source.counts[there].mean()))))
    places = np.linspace(0, len(there) - 1, min(count, len(there))).round().astype(int)
    return [int(shard) for shard in there[np.unique(places)]]


def _views(folder: RecordedRun, source: ShardSource, score: bool, lacks: Lacks) -> Views | None:
    if score:
        return _checkpoint_views(folder, source)
    store = folder.store
    field = belief_field(store)
    if store is None or field is None:
        lacks("beliefs about training labels", f"the method {folder.config.method['name']!r} remembers no scores of "
              "all classes: pass --score to run its kept checkpoints over training samples.")
        return None
    return Views(_SOURCES[field], lambda: [entry.name for entry in store.snapshots()],
                 lambda name: state_view(store, name, field, source))


def belief_field(store: StateStore | None) -> str | None:
    """The field that remembers a probability (or its logit) of every class, if the method keeps one."""
    return next((name for name in _SOURCES if store and name in store.schema.fields), None)


def state_view(store: StateStore, snapshot: str, field: str, source: ShardSource) -> View:
    reader, spec = store.reader(snapshot), store.schema.fields[field]

    def shard(number: int) -> tuple[np.ndarray, np.ndarray] | None:
        if reader.refs.get(field, {}).get(number) is None:
            return None  # not visited yet: it still has its initial values
        used = _used(source, number)
        return probabilities(spec, reader.read_shard(field, number)[used]), used

    return View(step_of(snapshot), shard)


def probabilities(field: Field, stored: np.ndarray) -> np.ndarray:
    """float32 of stored rows: a field with the range [0, 1] holds probabilities, any other one logits."""
    values = field.decode(stored).astype(np.float32)
    if field.range == (0.0, 1.0):
        return values
    return 1 / (1 + np.exp(-np.clip(values, -60, 60)))  # beyond that it is 0 or 1 anyway, and exp would overflow


def _checkpoint_views(folder: RecordedRun, source: ShardSource) -> Views:
    from lacuna.tools.passes.scoring import on_this_device
    from lacuna.tools.passes.trained import finished_checkpoints, open_trained

    if not finished_checkpoints(folder.path):
        raise UserError(f"--score: {folder.path} has no finished checkpoint. Train first, or leave --score out.")

    def view(checkpoint: str) -> View:
        model = on_this_device(open_trained(checkpoint), source)

        def shard(number: int) -> tuple[np.ndarray, np.ndarray]:
            values, facts = model.scores(number)
            return values, facts["rows"]

        return View(step_of(checkpoint), shard)

    return Views("scores of the kept checkpoints", lambda: finished_checkpoints(folder.path), view)


def _used(source: ShardSource, shard: int) -> np.ndarray:
    return np.arange(source.index.shards[shard].count) if source.subset is None else np.flatnonzero(
        source.subset.mask(shard))


def _look(view: View, source: ShardSource, full: Sidecar | None, shards: list[int]) -> dict[str, Any] | None:
    values, truths, knowns, surest = [], [], [], Surest()
    for shard in shards:
        found = view.shard(shard)
        if found is None or not len(found[1]):
            continue
        values.append(found[0])
        knowns.append(source.sidecar.labels(shard).dense(source.classes, found[1]))
        if full is not None:
            truths.append(full.labels(shard).dense(source.classes, found[1]))
        surest.offer(shard, found[1], found[0], knowns[-1], truths[-1] if truths else None)
    if not values:
        return None
    facts = moment_facts(np.concatenate(values), np.concatenate(knowns), np.concatenate(truths) if truths else None)
    return {**facts, "surest": surest.pick()}


def moment_facts(beliefs: np.ndarray, known: np.ndarray, truth: np.ndarray | None) -> dict[str, Any]:
    """Histograms (fractions per bin) and mAPs of one moment; `known` are the labels that training saw."""
    facts: dict[str, Any] = {"samples": len(beliefs), "top1": _shares(beliefs.max(axis=1)),
                             "sure": int(((known == UNKNOWN) & (beliefs >= SURE)).sum()),
                             "expected": float(beliefs.sum(axis=1, dtype=np.float64).mean()),
                             "given": float((known == POSITIVE).sum(axis=1).mean()),
                             "estimated": beliefs.mean(axis=0, dtype=np.float64).tolist(),
                             "true": [None] * beliefs.shape[1]}
    if truth is not None:
        hidden = known == UNKNOWN
        facts |= {
            "unobserved_positive": _shares(beliefs[hidden & (truth == POSITIVE)]),
            "unobserved_negative": _shares(beliefs[hidden & (truth == NEGATIVE)]),
            "recovery": average_precision(beliefs, truth, ungrouped=False).summary()["map_skip_empty"],
            "recovery_unobserved": average_precision(beliefs, np.where(hidden, truth, np.int8(UNKNOWN)),
                                                     ungrouped=False).summary()["map_skip_empty"],
            "true": (truth == POSITIVE).mean(axis=0).tolist(),
        }
    return facts


def _shares(values: np.ndarray) -> list[float]:
    counts, _ = np.histogram(values, BINS, (0.0, 1.0))
    return (counts / max(1, counts.sum())).tolist()
