"""What a stream gives for one step: inputs, labels and where every sample comes from.

Legend: n samples of a batch, L classes, D features, H × W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch


@dataclass(frozen=True)
class BadSample:
    shard: str
    row: int
    key: str
    reason: str


@dataclass
class Batch:
    """Samples of one step on one rank; a corrupt sample kept its slot in the plan but is not in here."""

    inputs: torch.Tensor  # uint8 [n, 3, H, W], or float32 [n, D] for feature shards
    labels: torch.Tensor  # int8 [n, L]
    shards: np.ndarray  # int64 [n]
    rows: np.ndarray  # int64 [n], position in the tar
    boxes: torch.Tensor  # float32 [n, 4]
    flips: torch.Tensor  # bool [n]
    planned: np.ndarray  # int64 [n + corrupt ones]: the shards of all samples that the plan has here
    bad: list[BadSample] = field(default_factory=list)
    strong: torch.Tensor | None = None  # uint8 [n, 3, H, W], a second view of every image, if it was asked for
    moved_from: torch.Tensor | None = None  # the labels on the host, once `labels` are on the training device
    other_labels: torch.Tensor | None = None  # int8 [n, L], of the images that inputs are mixed with, if they are
    shares: torch.Tensor | None = None  # float32 [n]: what is left of each sample's own image
    decoded: np.ndarray | None = None  # bool [n]: which inputs were made, where the stream left out known ones

    def __len__(self) -> int:
        return len(self.rows)

    def narrow(self, start: int, stop: int) -> Batch:
        """A micro-batch; bad samples are reported by the whole."""
        cut = slice(start, stop)
        return Batch(self.inputs[cut], self.labels[cut], self.shards[cut], self.rows[cut], self.boxes[cut],
                     self.flips[cut], self.shards[cut], strong=None if self.strong is None else self.strong[cut],
                     moved_from=None if self.moved_from is None else self.moved_from[cut],
                     other_labels=None if self.other_labels is None else self.other_labels[cut],
                     shares=None if self.shares is None else self.shares[cut])

    def mixed(self, inputs: torch.Tensor, partners: torch.Tensor, shares: torch.Tensor) -> Batch:
        """The same samples with other samples of the batch in their inputs."""
        return replace(self, inputs=inputs, other_labels=self.labels[partners], shares=shares)

    def without(self, bad: list[tuple[int, BadSample]]) -> Batch:
        """The same but for samples, by their places, that turned out to be corrupt."""
        places = {place for place, _ in bad}
        good = np.array([i for i in range(len(self)) if i not in places], dtype=np.int64)
        kept = torch.from_numpy(good)
        return Batch(self.inputs[kept], self.labels[kept], self.shards[good], self.rows[good], self.boxes[kept],
                     self.flips[kept], self.planned, self.bad + [sample for _, sample in bad],
                     None if self.strong is None else self.strong[kept],
                     decoded=None if self.decoded is None else self.decoded[good])

    @property
    def host_labels(self) -> torch.Tensor:
        """The labels where a shape may depend on them: on a training device that would make the host wait."""
        return self.labels if self.moved_from is None else self.moved_from

    @property
    def strong_view(self) -> torch.Tensor:
        if self.strong is None:
            raise RuntimeError("this batch has no second view: the method's needs() must ask for a strong_view")
        return self.strong
