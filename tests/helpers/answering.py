"""A person who knows the true labels answers the questions that `lacuna select` asked."""

from __future__ import annotations

import os
from pathlib import Path

from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.labels import POSITIVE
from lacuna.tools.explore.decisions import ACCEPT, REJECT, Decisions
from lacuna.tools.select.questions import read_questions


def decisions(run: str, shards: Path, labels: str) -> Decisions:
    sidecar = Sidecar.load(ShardIndex.load(str(shards)), labels)
    return Decisions(os.path.join(run, "explore", f"decisions-{labels}.jsonl"), sidecar)


def answer_all(run: str, shards: Path, labels: str, truth: str) -> None:
    made, known = decisions(run, shards, labels), Sidecar.load(ShardIndex.load(str(shards)), truth)
    for item in read_questions(os.path.join(run, "explore"), labels):
        row = known.labels(item["shard"]).dense(len(known.index.classes), [item["row"]])[0]
        made.decide((item["shard"], item["row"], item["class"]), ACCEPT if row[item["class"]] == POSITIVE else REJECT)
