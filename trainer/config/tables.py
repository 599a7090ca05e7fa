"""A paper's table of experiments in one YAML file: what is common is said once, and every row is one run.

  about: what it is, the command, the hardware
  source: who reports the rows' numbers, and of what (test mAP, …)
  base: base/coco14.yaml                  of every row that names none; one or several
  shared: {…}                             parts that rows repeat by YAML's & and *; not read by itself
  defaults: {…}                           settings of every row
  search: {"*_linear": {phases.0.lr: [1e-3, 1e-4]}}      by pattern (the first that fits), what the paper searched
  rows:
    coco14_an_linear: {method: {name: an}, phases: *linear, reported: 62.3}
A row's settings win over `defaults`, these over the bases. The run is named like its row.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from lacuna.basics.errors import UserError
from lacuna.trainer.config.data_section import Section
from lacuna.trainer.config.sections import Config
from lacuna.trainer.config.spaces import grid, parse_space
from lacuna.trainer.config.validation import validated

Numbers = float | dict[str, float | list[float]]
"""What a paper reports for a row: a number, or several by name."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Bases = Annotated[list[str], BeforeValidator(_listed)]


class Row(Section):
    """One experiment. Its other keys are sections of a config."""

    base: Bases | None = None
    """Instead of the table's."""
    reported: Numbers | None = None
    """The number to reach, or several by name."""
    note: str = ""
    """What a reader of this row has to know."""


class Table(Section):
    about: str
    source: str = ""
    base: Bases = Field(default_factory=list)
    shared: dict[str, Any] = Field(default_factory=dict)
    defaults: dict[str, Any] = Field(default_factory=dict)
    search: dict[str, dict[str, Any] | None] = Field(default_factory=dict)
    """Pattern of rows → choices whose combinations were tried, the best chosen on validation images; null: none."""
    rows: dict[str, dict[str, Any]] = Field(min_length=1)


_SHOWN = 24  # rows in an error message
_SETTINGS = [key for key in Config.model_fields if key != "name"]


@dataclass(frozen=True)
class Experiment:
    """A row, taken apart."""

    name: str
    bases: list[str]
    settings: list[dict]  # later ones win
    row: Row


def is_table(body: dict) -> bool:
    return "rows" in body


def parse_table(body: dict, where: str) -> Table:
    """A checked table; every mistake is a UserError that names the key."""
    table = validated(Table, body, where)
    _check_keys(table.defaults, _SETTINGS, f"{where}: defaults")
    for pattern, space in table.search.items():
        grid(parse_space(space or {}, f"{where}: search {pattern}"), f"{where}: search {pattern}")
        if not fnmatch.filter(table.rows, pattern):
            raise UserError(f"{where}: search {pattern!r}: no row fits; {closest(pattern, table.rows, 'rows')}")
    for name, row in table.rows.items():
        if not name or set(name) & set(":/\\") or name.strip(".") == "":
            raise UserError(f"{where}: row {name!r}: a run's folder is named like it; use letters, digits, - and _.")
        _check_keys(row, [*Row.model_fields, *_SETTINGS], f"{where}: row {name}")
        made = validated(Row, {key: row[key] for key in row if key in Row.model_fields}, f"{where}: row {name}")
        if made.reported is not None and not table.source:
            raise UserError(f"{where}: row {name} has a reported number, but key 'source' does not say whose it is.")
    return table


def searched(table: Table, row: str) -> list[dict[str, Any]]:
    """The settings that the paper tried for a row, each by its keys; empty: it had no search."""
    space = next((space for pattern, space in table.search.items() if fnmatch.fnmatchcase(row, pattern)), None)
    return grid(parse_space(space, row), row) if space else []


def pick(table: Table, row: str | None, where: str) -> Experiment:
    """The row of that name."""
    if row is None:
        names = list(table.rows)
        rest = f" and {len(names) - _SHOWN} more (`lacuna configs {where}`)" if len(names) > _SHOWN else ""
        raise UserError(f"{where}: a table of {len(names)} rows; name one, as {where}:{names[0]}. "
                        f"Rows: {', '.join(names[:_SHOWN])}{rest}.")
    if row not in table.rows:
        hint = closest(row, table.rows, "rows")
        raise UserError(f"{where}: no row {row!r}; {hint} `lacuna configs {where}` says more.")
    body = table.rows[row]
    made = Row.model_validate({key: body[key] for key in body if key in Row.model_fields})
    own = {key: value for key, value in body.items() if key not in Row.model_fields}
    return Experiment(row, table.base if made.base is None else made.base, [table.defaults, own, {"name": row}], made)


def closest(word: str, legal: Iterable[str], what: str) -> str:
    """The end of a sentence about a name that is not there."""
    legal = list(legal)
    close = difflib.get_close_matches(word, legal, 1)
    return f"did you mean {close[0]!r}?" if close else f"{what}: {', '.join(legal)}."


def _check_keys(body: dict, legal: list[str], where: str) -> None:
    for key in body:
        if key == "name":
            raise UserError(f"{where}: unknown key 'name'; a run is named like its row.")
        if key not in legal:
            raise UserError(f"{where}: unknown key {key!r}; {closest(str(key), legal, 'legal keys')}")
