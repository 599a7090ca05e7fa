"""Heatmaps of some training images over the kept snapshots, as small pictures inside the page."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from lacuna.data_pipelines.decode import decode_image
from lacuna.data_pipelines.index import Sidecar
from lacuna.data_pipelines.source import OpenShard
from lacuna.tools.heatmaps.drawing import overlay
from lacuna.tools.heatmaps.seen import Looks, SeenMap, keeps_heatmaps, maps_of
from lacuna.tools.report.recorded_run import Lacks, RecordedRun, full_labels
from lacuna.tools.run_files import each_kept, step_of

_SIDE = 96
_MOMENTS = 8
_CLASSES = 3  # of one image


def strips_of(folder: RecordedRun, full_name: str, count: int, lacks: Lacks) -> dict[str, Any] | None:
    store = folder.store
    if store is None or not keeps_heatmaps(store):
        lacks("heatmaps over epochs", f"the method {folder.config.method['name']!r} keeps no heatmaps; those that end "
              "in _scl do.")
        return None
    source = folder.train
    snapshots = [entry.name for entry in store.snapshots()]
    if source is None or not snapshots or not count:
        lacks("heatmaps over epochs", "there is no snapshot, no training set, or --images is 0.")
        return None
    if len(snapshots) < 3:
        lacks("heatmaps over all epochs", f"only {len(snapshots)} snapshots were kept: train with a larger train.keep.")
    picked = [snapshots[i] for i in np.unique(np.linspace(0, len(snapshots) - 1, _MOMENTS).round().astype(int))]
    shard = int(np.flatnonzero(source.counts)[0])
    opened, full = source.open(shard), full_labels(source, full_name)
    rows = _choose(opened, full, count)

    def still() -> list[str]:
        kept = {entry.name for entry in store.snapshots()}
        return [name for name in picked if name in kept]

    looks, decoded = Looks(folder.config, source), [decode_image(opened.read(row)) for row in rows]

    def look(name: str) -> list[dict[int, SeenMap]]:
        reader = store.reader(name)
        return [looks.seen(maps, reader, shard, row, pixels, step_of(name))
                for maps, row, pixels in zip(maps_of(reader, shard, rows), rows, decoded, strict=True)]

    maps = each_kept(still, look)
    images = [_image(opened, row, decoded[i], [found[i] for found in maps.values()], full, source.index.classes)
              for i, row in enumerate(rows)]
    return {"steps": [step_of(name) for name in maps], "images": images}


def _choose(opened: OpenShard, full: Sidecar | None, count: int) -> list[int]:
    """Rows with most labels to find first: an image with a single object shows little."""
    labels = full.labels(opened.shard) if full else opened.labels
    found = np.array([len(labels.positives(int(row))) for row in opened.used])
    best = np.argsort(-np.minimum(found, _CLASSES), kind="stable")[:count]
    return [int(opened.used[i]) for i in best]


def _image(opened: OpenShard, row: int, image: torch.Tensor, moments: list[dict[int, SeenMap]], full: Sidecar | None,
           names: list[str]) -> dict[str, Any]:
    """The annotated classes, then the true ones that were hidden, then the strongest at the last moment."""
    known = [int(i) for i in opened.labels.positives(row)]
    hidden = [int(i) for i in full.labels(opened.shard).positives(row) if i not in known] if full else []
    last = moments[-1]
    strongest = sorted(last, key=lambda i: -last[i].peak)
    chosen = [i for i in dict.fromkeys([*known, *hidden, *strongest]) if i in last][:_CLASSES]
    picture = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((_SIDE, _SIDE), Image.Resampling.BICUBIC)
    rows = []
    for cls in chosen:
        note = "annotated" if cls in known else "hidden positive" if cls in hidden else "not a label" if full else ""
        cells = [None if cls not in maps else {"picture": data_uri(overlay(picture, maps[cls])),
                                               "peak": round(maps[cls].peak, 3),
                                               "start": round(maps[cls].start_share, 3)} for maps in moments]
        rows.append({"name": names[cls], "note": note, "cells": cells})
    return {"key": opened.members.keys[row], "picture": data_uri(picture), "rows": rows}


def data_uri(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
