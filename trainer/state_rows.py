"""A batch's rows of the method's fields, as tensors on the training device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch

from lacuna.state_store.cutoffs import Cutoffs
from lacuna.state_store.rows import Rows


@dataclass
class Masked:
    """New values of a field, to be written only where `mask` (broadcastable to them) is true."""

    values: torch.Tensor
    mask: torch.Tensor


class StateRows:
    def __init__(self, rows: Rows, device: torch.device):
        self._rows, self._device = rows, device

    def narrow(self, start: int, stop: int) -> StateRows:
        """Those of a micro-batch."""
        return StateRows(self._rows.narrow(start, stop), self._device)

    def read(self, field: str) -> torch.Tensor:
        """Values as floats (quantised, float16), booleans (bits) or integers."""
        stored = self._rows.gather(field)
        if stored.dtype == np.float16:  # torch widens halves many times faster than numpy
            return torch.from_numpy(stored).to(self._device, non_blocking=True).float()
        return torch.from_numpy(self._rows.decode(field, stored)).to(self._device, non_blocking=True)

    def codes(self, field: str) -> np.ndarray:
        """Stored values, for cut-offs."""
        return self._rows.gather(field)

    def samples(self, rows_per_shard: int) -> np.ndarray:
        """int64 [B]: a number for every sample, shard by shard."""
        return self._rows.shards.astype(np.int64) * rows_per_shard + self._rows.rows

    def selected(self, field: str, cutoffs: Cutoffs) -> torch.Tensor:
        """bool [B, L]: which entries are among their class's top p."""
        chosen = cutoffs.selected(self.codes(field), self._rows.shards, self._rows.rows)
        return torch.from_numpy(chosen).to(self._device, non_blocking=True)

    def write(self, values: dict[str, torch.Tensor | Masked]) -> None:
        for field, value in values.items():
            if isinstance(value, Masked):
                before = self._rows.gather(field)
                self._rows.write(field, value.values.detach().cpu().numpy())
                # What the mask leaves out must stay bit for bit: rounding it again could move it.
                after = np.where(value.mask.cpu().numpy(), self._rows.gather(field), before)
                self._rows.scatter(field, after)
            else:
                self._rows.write(field, value.detach().cpu().numpy())


class NoRows(StateRows):
    """Of methods that remember nothing: to read or to write something is a mistake of the method's `fields`."""

    def __init__(self) -> None:
        pass

    def read(self, field: str) -> NoReturn:
        raise RuntimeError(f"field {field!r} is asked for, but the method declares no fields")

    def codes(self, field: str) -> NoReturn:
        self.read(field)

    def selected(self, field: str, cutoffs: Cutoffs) -> NoReturn:
        self.read(field)

    def narrow(self, start: int, stop: int) -> StateRows:
        return self

    def write(self, values: dict[str, torch.Tensor | Masked]) -> None:
        if values:
            raise RuntimeError(f"rows of {sorted(values)} were given, but the method declares no fields")


NO_ROWS = NoRows()
