"""A batch's rows on an accelerator: stored codes go up and are decoded there; new rows are encoded there and go down
without the loop waiting. A thread scatters them: a sample comes once an epoch, so nobody reads them before."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from lacuna.state_store.cutoffs import Cutoffs
from lacuna.state_store.fields import Field
from lacuna.state_store.rows import Rows
from lacuna.trainer.on_device import codes, hashing
from lacuna.trainer.on_device.ahead import Gathered, gathered
from lacuna.trainer.on_device.downloads import Download, Downloads
from lacuna.trainer.state_rows import Masked, StateRows


@dataclass
class NewRows:
    """On their way to the host."""

    rows: Rows
    fields: list[Field]
    checked: list[Field]  # those that cannot hold every number
    download: Download  # codes of every field; then of the checked ones [B]: the largest number of each row

    def land(self) -> None:
        """Wait for them and scatter them."""
        parts = self.download.wait()
        for field, largest in zip(self.checked, parts[len(self.fields) :], strict=True):
            field.check_finite(np.isfinite(largest))
        for field, stored in zip(self.fields, parts, strict=False):
            self.rows.scatter(field.name, stored.view(field.stored_dtype))


class DeviceRows(StateRows):
    def __init__(self, rows: Rows, device: torch.device, downloads: Downloads, landing: list[Future[None]],
                 ahead: Gathered, fields: set[str]):
        """`landing` takes what is on its way down; `ahead` is gathered already; `fields` learns which ones are read."""
        super().__init__(rows, device)
        self._downloads, self._landing, self._ahead, self._fields = downloads, landing, ahead, fields
        self._uploaded: dict[str, torch.Tensor] = {}

    def narrow(self, start: int, stop: int) -> DeviceRows:
        ahead = {field: stored[start:stop] for field, stored in self._ahead.items()}
        return DeviceRows(self._rows.narrow(start, stop), self._device, self._downloads, self._landing, ahead,
                          self._fields)

    def read(self, field: str) -> torch.Tensor:
        return codes.decode(self._rows.field(field), self._up(field))

    def selected(self, field: str, cutoffs: Cutoffs) -> torch.Tensor:
        return hashing.selected(cutoffs, self._up(field), self._rows.shards, self._rows.rows)

    def write(self, values: dict[str, torch.Tensor | Masked]) -> None:
        fields, encoded, checked, largest = [], [], [], []
        for name, value in values.items():
            field, new = self._rows.field(name), value.values if isinstance(value, Masked) else value
            new = new.detach()
            if new.device.type == "cpu":  # known before the step
                self._rows.write(name, new.numpy())
                continue
            keys = self._rows.rounding_keys(field)
            stored = codes.encode(field, new, None if keys is None else hashing.upper(keys, self._device))
            if isinstance(value, Masked):  # what the mask leaves out stays bit for bit
                stored = torch.where(value.mask, stored, self._up(name).to(stored.dtype))
            fields.append(field)
            encoded.append(stored)
            if field.range is not None or field.stochastic:
                checked.append(field)
                # A NaN is larger than any number here: one reduction tells both from what is finite.
                largest.append(new.abs().amax(tuple(range(1, new.ndim))) if new.ndim > 1 else new)
        if fields:
            new_rows = NewRows(self._rows, fields, checked, self._downloads.begin(encoded + largest))
            self._landing.append(self._downloads.threads.submit(new_rows.land))

    def _up(self, field: str) -> torch.Tensor:
        """Stored numbers on the device, copied once per step."""
        if field not in self._uploaded:
            self._fields.add(field)
            stored = self._ahead[field] if field in self._ahead else gathered(self._rows, field, self._device)
            self._uploaded[field] = codes.upload(self._rows.field(field), stored, self._device)
        return self._uploaded[field]
