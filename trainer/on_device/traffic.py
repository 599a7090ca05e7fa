"""The state's rows between host and device: gathered ahead, uploaded, and scattered by threads when new ones arrive."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store.rows import Rows
from lacuna.state_store.session import Session
from lacuna.trainer.on_device.ahead import RowsAhead
from lacuna.trainer.on_device.downloads import Downloads
from lacuna.trainer.on_device.rows import DeviceRows


class Traffic:
    """Of one rank, as long as its state."""

    def __init__(self, session: Session, source: ShardSource, device: torch.device):
        self.device = device
        # Two: gathering must not queue behind rows that the device has not computed yet.
        self.threads = ThreadPoolExecutor(2, "state-rows")
        self.downloads = Downloads(device, self.threads)
        self.ahead = RowsAhead(session, source, device, self.threads)

    def rows(self, at: Rows, landing: list[Future[None]]) -> DeviceRows:
        """Of a step; `landing` takes what has to end before its shards are given back."""
        ready = self.ahead.take(at)
        self.ahead.start()
        return DeviceRows(at, self.device, self.downloads, landing, ready, self.ahead.fields)

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
