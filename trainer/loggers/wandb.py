"""Weights & Biases. Its own environment variables say where to: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline, …

A row is sent when the next step begins, so a launch that is killed leaves no half row. Of a resumed run the service
knows the last step, and refuses older ones. Offline, every launch leaves a folder under wandb/, all with one id; nobody
knows there what a killed launch has left, so the newest folder gets the whole run.
"""

from __future__ import annotations

import os
import uuid

from lacuna.basics.errors import UserError
from lacuna.trainer.config.sections import Config
from lacuna.trainer.loggers.sender import Sender


def new_identity() -> str:
    return uuid.uuid4().hex[:16]


class WeightsAndBiases:
    catches_up = True

    def __init__(self, config: Config, identity: str):
        import wandb  # an extra

        settings = wandb.Settings(console="off", silent=True)  # our log is our own
        try:
            self.run = wandb.init(project=os.environ.get("WANDB_PROJECT", "lacuna"), id=identity, name=config.name,
                                  resume="allow", config=config.model_dump(mode="json"), settings=settings)
        except Exception as error:  # its errors have no common class
            said = " ".join(str(error).split())[:300]
            raise UserError(f"train.loggers: Weights & Biases does not begin a run ({type(error).__name__}: {said}). "
                            "`wandb login`, or set WANDB_MODE=offline, or leave 'wandb' out.") from None
        self.first = self.run.starting_step
        self.sender = Sender("Weights & Biases")

    def write(self, kind: str, step: int, values: dict[str, float]) -> None:
        if step >= self.first:
            row = {f"{kind}/{key}": value for key, value in values.items()}
            self.sender.put(lambda: self.run.log(row, step=step))

    def flush(self) -> None:
        pass  # its own process sends

    def close(self, whole: bool) -> None:
        self.sender.put(lambda: self.run.finish(exit_code=0 if whole else 1))
        self.sender.close()
