"""A run folder around weights that no training run wrote, as commands read runs: config, classes, one checkpoint."""

from __future__ import annotations

import hashlib
import json

import torch
import yaml
from safetensors.torch import save

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.tools.passes.trained import Trained
from lacuna.tools.run_files import read_file, run_name
from lacuna.trainer.checkpoints.commits import COMMIT, MODEL, Commits, signed
from lacuna.trainer.run_folder import CONFIG
from lacuna.trainer.run_log import CLASS_LIST


def write_run(out: str, trained: Trained, weights: dict[str, torch.Tensor], facts: dict) -> None:
    """The checkpoint's commit comes last: until then there is no run."""
    if storage.exists(storage.join(out, CONFIG)):
        raise UserError(f"--out {out}: there is already a run. Choose another name, or delete it first.")
    config = trained.config.model_copy(update={"name": run_name(out), "run_folder": out.rsplit("/", 1)[0]})
    storage.write_atomic(storage.join(out, CONFIG), yaml.safe_dump(config.model_dump(mode="json")).encode())
    classes = read_file(trained.run, CLASS_LIST)
    if classes is not None:
        storage.write_atomic(storage.join(out, CLASS_LIST), classes)
    storage.write_atomic(storage.join(out, "results.json"), json.dumps({"refit": facts}).encode())
    data = save({name: tensor.contiguous() for name, tensor in weights.items()})
    commits, name = Commits(storage.join(out, "checkpoints")), Commits.name(1)
    storage.write_atomic(commits.url(name, MODEL), data)
    body = {"files": {MODEL: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}},
            "position": {"best_step": 1}, "refit": facts}
    storage.write_atomic(commits.url(name, COMMIT), signed(body))
