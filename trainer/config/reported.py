"""The numbers that papers report, as the tables that ship hold them: by method and dataset."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

from lacuna.basics.places import CONFIGS
from lacuna.trainer.config.files import merge_layers, read_bases, read_table, shipped
from lacuna.trainer.config.tables import Numbers, pick


@dataclass(frozen=True)
class Reported:
    config: str
    """TABLE:ROW, which `lacuna train` takes."""
    method: str
    dataset: str
    """Name of the row's base."""
    numbers: Numbers
    source: str
    """Who reports it, and of what."""


@functools.cache
def reported() -> list[Reported]:
    """Of every row that has a number to reach, in the tables' order."""
    found: list[Reported] = []
    known: dict[tuple[str, ...], dict] = {}
    for name in shipped():
        table = read_table(name)
        if table is None:
            continue
        for row in table.rows:
            experiment = pick(table, row, name)
            if experiment.row.reported is None:
                continue
            bases = tuple(experiment.bases)
            if bases not in known:
                known[bases] = read_bases(list(bases), os.path.join(CONFIGS, f"{name}.yaml"))
            method = merge_layers(known[bases], experiment.settings)["method"]["name"]
            found.append(Reported(f"{name}:{row}", method, known[bases]["name"], experiment.row.reported,
                                  table.source))
    return found


def reported_for_run(name: str, method: str) -> Reported | None:
    """Of the row that a run is named like, if it trains the row's method."""
    return next((r for r in reported() if r.config.partition(":")[2] == name and r.method == method), None)


def as_text(numbers: Numbers) -> str:
    """`62.3`, or `mAP(C) 86.72, mAP(O) 93.57`."""
    if not isinstance(numbers, dict):
        return f"{numbers:g}"
    return ", ".join(f"{name} " + " / ".join(f"{n:g}" for n in (value if isinstance(value, list) else [value]))
                     for name, value in numbers.items())
