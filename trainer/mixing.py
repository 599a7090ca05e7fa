"""Mixup and cutmix for ternary labels: an image is laid over another one of its batch, the loss is that of both labels.

The loss of a mixed image is share × its loss with its own labels + (1 − share) × its loss with the other's, so unknown
entries stay unknown on either side. Pairs are neighbours in their canonical stream, and all draws are hashes of what
they belong to: the same on any number of ranks, and after a resume. Only methods that look at one image and its labels
can do this: what is remembered about a sample must not come from a mixture.
Legend: B samples of a rank's share, H image side.
"""

from __future__ import annotations

import numpy as np
import torch

from lacuna.basics.errors import UserError
from lacuna.basics.hashing import mix, uniform_array
from lacuna.data_pipelines.batch import Batch
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.trainer.config.sections import Config
from lacuna.trainer.methods.base import Method

_SEED = 11  # keeps this use of the run's seed apart
_TRIES = 64  # of a draw that may be refused; with strength 1 half of them are
_KIND, _PLACE, _SHARE = 0, 1, 2


class Mixer:
    """Of one phase."""

    def __init__(self, config: Config, phase: int):
        self.mixup, self.cutmix = config.train.mixup, config.train.cutmix
        self.seed = mix(config.seed, phase, _SEED)

    def apply(self, batch: Batch, plan: EpochPlan) -> Batch:
        """The same batch if nothing is to be mixed."""
        if not (self.mixup or self.cutmix) or not len(batch):
            return batch
        partners = torch.from_numpy(pairs(plan, batch.shards))
        draws = [Draws(mix(self.seed, plan.epoch, int(shard), int(row)))
                 for shard, row in zip(batch.shards, batch.rows, strict=True)]
        others = batch.inputs[partners]
        inputs, shares = batch.inputs.clone(), torch.ones(len(batch))
        for i, draw in enumerate(draws):
            if partners[i] == i:
                continue
            cut = self.cutmix and (not self.mixup or draw.uniform(_KIND) < 0.5)
            share = draw.beta(self.cutmix if cut else self.mixup)
            if cut:
                rows, columns, share = draw.box(share, batch.inputs.shape[-1])
                inputs[i, :, rows, columns] = others[i, :, rows, columns]
            else:
                blend = share * batch.inputs[i].float() + (1 - share) * others[i].float()
                inputs[i] = blend.round() if inputs.dtype == torch.uint8 else blend
            shares[i] = share
        return batch.mixed(inputs, partners, shares)


def pairs(plan: EpochPlan, shards: np.ndarray) -> np.ndarray:
    """int64 [B]: every sample's partner is the next one of its stream, the last one's the first; alone, itself."""
    streams = {shard: stream for stream, order in enumerate(plan.stream_shards) for shard in order}
    found = np.arange(len(shards))
    each = np.array([streams[int(shard)] for shard in shards])
    for stream in np.unique(each):
        here = np.flatnonzero(each == stream)
        found[here] = np.roll(here, -1)
    return found


class Draws:
    """Everything random about one sample's mixture."""

    def __init__(self, seed: int):
        self.seed = seed

    def uniform(self, use: int, count: int = 1) -> np.ndarray:
        return uniform_array(mix(self.seed, use), np.arange(count))

    def beta(self, strength: float) -> float:
        """Beta(strength, strength) by Jöhnk's rule, for strengths up to 1."""
        u, v = self.uniform(_SHARE, 2 * _TRIES).reshape(2, -1) ** (1 / strength)
        good = np.flatnonzero((u + v > 0) & (u + v <= 1))
        return float(u[good[0]] / (u + v)[good[0]]) if len(good) else 0.5

    def box(self, share: float, side: int) -> tuple[slice, slice, float]:
        """Rows and columns of the other image's part, 1 − share of the area, and the share that is really left."""
        length = round(side * (1 - share) ** 0.5)
        top, left = (int(u * (side - length + 1)) for u in self.uniform(_PLACE, 2))
        return slice(top, top + length), slice(left, left + length), 1 - length**2 / side**2


def check_mixing(config: Config, method: Method, images: bool) -> None:
    """Refuse what would be remembered of, or said about, mixtures as if they were images."""
    given = {"mixup": config.train.mixup, "cutmix": config.train.cutmix}
    name = next((key for key, value in given.items() if value), None)
    if name is None:
        return
    needs, where = method.needs(), f"train.{name} = {given[name]}"
    off = f"Set train.{name}=0, or use a method such as 'an', 'selection' or 'softmax'."
    if method.fields():
        raise UserError(f"{where}: method {config.method['name']!r} remembers single samples, and what it would learn "
                        f"about a mixture belongs to none. {off}")
    if needs.maps or needs.strong_view or needs.whole_batch or method.module() is not None:
        raise UserError(f"{where}: method {config.method['name']!r} compares images, views or places, which a mixture "
                        f"has two of. {off}")
    if config.train.group_weight:
        raise UserError(f"{where}: train.group_weight = {config.train.group_weight} remembers how a group's samples "
                        "look, and a mixture belongs to two. Set one of them to 0.")
    if cached := [f"phases.{number}.cache" for number, phase in enumerate(config.phases) if phase.cache is not None]:
        raise UserError(f"{where} makes new images from those of a batch, and {cached[0]} keeps what was computed of "
                        f"single ones. Leave the cache out, or set train.{name}=0.")
    if config.train.cutmix and not images:
        raise UserError(f"train.cutmix = {config.train.cutmix}: feature vectors have no places to cut. Use "
                        "train.mixup.")
