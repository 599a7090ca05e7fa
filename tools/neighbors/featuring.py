"""Features of image shards by a backbone, written as feature shards: same shards, rows, keys and labels as the images.

They can be trained on by themselves (`model.backbone: features`). An image that cannot be decoded keeps its row, with a
vector of NaNs, which every reader counts as unreadable.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from lacuna.basics import storage
from lacuna.data_pipelines.index import Shard, ShardIndex, SidecarWriter
from lacuna.data_pipelines.shard_tables import Members
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.subsets import Subset
from lacuna.data_pipelines.tar_writer import TarWriter
from lacuna.tools.passes.parts import fingerprint_of
from lacuna.tools.passes.pool import Pool
from lacuna.tools.passes.scoring import ShardModel, on_this_device, pass_facts
from lacuna.tools.passes.trained import Trained
from lacuna.trainer.config.sections import Config, parse_config
from lacuna.trainer.models.classifier import Classifier, build_model


@dataclass(frozen=True)
class Backbone:
    """A pretrained backbone that no run of ours has trained."""

    name: str  # as model.backbone
    weights: str  # as model.weights
    image_size: int
    normalize: str

    def config(self, source: ShardSource) -> Config:
        return parse_config({
            "name": "features", "method": {"name": "an"},
            "data": {"train": {"url": source.index.url, "labels": source.sidecar.name}, "workers": 1,
                     "image_size": self.image_size, "normalize": self.normalize},
            "model": {"backbone": self.name, "weights": self.weights},
            "phases": [{"name": "none", "epochs": 1, "batch": 8, "lr": 1.0}],
        }, "lacuna neighbors")

    def load(self, source: ShardSource) -> ShardModel:
        torch.set_num_threads(1)
        config = self.config(source)
        model = build_model(config.model, config.data, source.classes, 0)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return ShardModel(model.to(device).eval(), source, config)


@dataclass(frozen=True)
class FeatureJob:
    """Writes a feature shard; its part has the tar's size and how many images could not be read."""

    model: Trained | Backbone
    source: ShardSource  # all rows of the images: features serve every subset
    out: str

    @property
    def fingerprint(self) -> str:
        if isinstance(self.model, Trained):
            return fingerprint_of(job="features", out=self.out, **pass_facts(self.model, self.source))
        facts = self.model.config(self.source).model_dump()
        return fingerprint_of(job="features", out=self.out, index=self.source.index.fingerprint, model=facts["model"],
                              data=facts["data"])

    def build(self) -> Callable[[int], Mapping[str, np.ndarray]]:
        worker = (on_this_device(self.model, self.source) if isinstance(self.model, Trained)
                  else self.model.load(self.source))

        def work(shard: int) -> Mapping[str, np.ndarray]:
            features, facts = worker.run(shard, pooled)
            rows = int(self.source.index.counts[shard])
            vectors = np.full((rows, features.shape[1] or worker.model.width), np.nan, np.float16)
            vectors[facts["rows"]] = features
            return {"bytes": np.array(self._write(shard, vectors)), "bad": np.array(rows - len(features))}

        return work

    def _write(self, shard: int, vectors: np.ndarray) -> int:
        members = self.source.index.members(shard)
        buffer = io.BytesIO()
        tar = TarWriter(buffer)
        offsets, sizes = np.zeros(len(vectors), np.int64), np.zeros(len(vectors), np.int64)
        for row, (key, vector) in enumerate(zip(members.keys, vectors, strict=True)):
            member = io.BytesIO()
            np.save(member, vector, allow_pickle=False)
            offsets[row], sizes[row] = tar.add(f"{key}.npy", member.getvalue()), len(member.getvalue())
        size = tar.close()
        stem = self.source.index.shards[shard].stem
        table = Members(members.keys, ["npy"] * len(vectors), offsets, sizes, members.positions)
        storage.write_atomic(storage.join(self.out, "members", stem + ".npz"), table.to_bytes())
        storage.write_atomic(storage.join(self.out, stem + ".tar"), buffer.getbuffer())
        return size


def pooled(model: Classifier, inputs: torch.Tensor) -> torch.Tensor:
    features = model.features(inputs)
    return features.mean((2, 3)) if features.ndim == 4 else features


def write_features(pool: Pool, model: Trained | Backbone, source: ShardSource, out: str, parts: str) -> ShardSource:
    """The images' features as a dataset of its own, with their label sidecar and subset."""
    whole = ShardSource(source.index, source.sidecar, None, source.scratch)
    shards = {shard: int(rows) for shard, rows in enumerate(source.index.counts)}
    done = pool.run(FeatureJob(model, whole, out), shards, parts, "features")
    sizes = [int(arrays["bytes"]) for _, arrays in done.read_all(list(shards))]
    images = source.index
    made = [Shard(shard.stem + ".tar", shard.count, size) for shard, size in zip(images.shards, sizes, strict=True)]
    facts = {"features_of": images.url, "model": _described(model)}
    index = ShardIndex(out, images.classes, made, images.split, "feature", images.class_ids, facts)
    writer = SidecarWriter(index, source.sidecar.name, source.sidecar.unlisted, source.sidecar.source)
    for shard in shards:
        writer.write(shard, source.sidecar.labels(shard))
    sidecar, subset = writer.close(), None
    if source.subset is not None:
        masks = [source.subset.mask(shard) for shard in shards]
        subset = Subset.from_masks(index, source.subset.name, masks, source.subset.source)
        subset.save()
    index.save()
    return ShardSource(index, sidecar, subset, source.scratch)


def _described(model: Trained | Backbone) -> str:
    if isinstance(model, Trained):
        return f"{model.checkpoint} ({model.digest[:16]})"
    return f"{model.name}, weights {model.weights}, {model.image_size} px"
