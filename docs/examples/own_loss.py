"""Plug in a loss of your own and train with it: own_loss.py SHARDS. A method is one class; nothing else changes."""

import sys

import torch
import torch.nn.functional as F
from pydantic import Field

import lacuna
from lacuna.trainer.methods import METHODS
from lacuna.trainer.methods.base import LossTerms, Method, Settings, positive


class DoubtSettings(Settings):
    trust: float = Field(0.3, ge=0, le=1)
    """How much an unlabelled class counts as absent."""


class Doubt(Method[DoubtSettings]):
    """Binary cross-entropy in which unlabelled classes count only a little."""

    settings_type = DoubtSettings
    paper = "ours, for this example"

    def loss(self, outputs, batch, step):
        known = positive(batch.labels)
        entries = F.binary_cross_entropy_with_logits(outputs.logits, known.float(), reduction="none")
        return LossTerms((entries * torch.where(known, 1.0, self.settings.trust)).mean(1))


METHODS["doubt"] = Doubt
config = lacuna.load_config(
    "demo", "name=doubt", f"data.train.url={sys.argv[1]}", "data.train.labels=single", "data.val=null",
    "data.test=null", "method.name=doubt", "method.trust=0.2", "phases.0.epochs=1", "phases.1.epochs=1")
print("trained:", lacuna.train(config).folder)
