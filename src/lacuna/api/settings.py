"""Configs and methods: what can be trained, and how it is described."""

from __future__ import annotations

from typing import Any

from lacuna.trainer.config import files
from lacuna.trainer.config.sections import Config

__all__ = ["Config", "load_config", "methods"]


def load_config(path: str, *overrides: str) -> Config:
    """The checked config of a YAML file, or of one that ships with Lacuna, with changes.

        config = lacuna.load_config("demo", "phases.0.lr=1e-3", "train.precision=bf16")
        config.phases[0].lr  # 0.001

    `path` and the overrides are what `lacuna train` takes: `lacuna configs` lists the names that ship. Every mistake is
    a `lacuna.UserError` that names the key.
    """
    return files.load_config(path, list(overrides))


def methods() -> dict[str, dict[str, Any]]:
    """Every method by its name: paper, what it remembers about each sample, what it needs, its settings.

        for name, facts in lacuna.methods().items():
            print(name, facts["paper"], [setting["name"] for setting in facts["settings"]])

    The same facts as `lacuna methods --json`.
    """
    from lacuna.tools.methods import describe  # builds models of methods: torch
    from lacuna.trainer.methods import METHODS

    return {name: describe(name) for name in METHODS}
