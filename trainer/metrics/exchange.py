"""Moves numpy arrays of uneven length between the ranks of an evaluation, on gloo or NCCL, or in one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist


class Peers:
    """The ranks of a process group (the default one if None); a world of one when torch.distributed is not in use."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        running = dist.is_available() and dist.is_initialized()
        self.world = dist.get_world_size(group) if running else 1
        self.rank = dist.get_rank(group) if running else 0
        # NCCL moves CUDA memory only; every other backend takes CPU tensors.
        backends = str(dist.get_backend(group)) if running else "none"
        self.device = torch.device("cuda", torch.cuda.current_device()) if backends == "nccl" else torch.device("cpu")

    def swap(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """parts[r] goes to rank r; returns what every rank sent here, flat. All parts of all ranks have one dtype."""
        assert len(parts) == self.world, f"{len(parts)} parts for {self.world} ranks"
        if self.world == 1:
            return [parts[0].reshape(-1)]
        dtype = parts[0].dtype
        payload = [np.ascontiguousarray(p).reshape(-1).view(np.uint8) for p in parts]
        sizes = [len(p) for p in payload]
        incoming = self._all_to_all(torch.tensor(sizes, dtype=torch.int64), [1] * self.world, [1] * self.world).tolist()
        received = self._all_to_all(torch.from_numpy(np.concatenate(payload)), sizes, incoming).numpy()
        return [piece.view(dtype) for piece in np.split(received, np.cumsum(incoming)[:-1])]

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """Every rank's array, flat, in rank order, on every rank."""
        return self.swap([array] * self.world)

    def sum(self, counts: np.ndarray) -> np.ndarray:
        """The sum over ranks of an integer array that has one shape everywhere."""
        return np.stack(self.gather(counts)).sum(axis=0).reshape(counts.shape)

    def _all_to_all(self, data: torch.Tensor, sizes: list[int], incoming: list[int]) -> torch.Tensor:
        out = torch.empty(sum(incoming), dtype=data.dtype, device=self.device)
        dist.all_to_all_single(out, data.to(self.device), incoming, sizes, group=self.group)
        return out.cpu()
