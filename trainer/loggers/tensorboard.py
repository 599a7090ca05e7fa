"""TensorBoard's event files, in the run folder. What a lost launch wrote is dropped by the purge step of the next."""

from __future__ import annotations

from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    catches_up = False

    def __init__(self, folder: str, at: int):
        self.writer = SummaryWriter(folder, purge_step=at + 1)

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        for key, value in values.items():
            self.writer.add_scalar(f"{kind}/{key}", value, step)

    def flush(self) -> None:
        self.writer.flush()

    def close(self, whole: bool) -> None:
        self.writer.close()
