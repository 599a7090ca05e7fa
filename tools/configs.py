"""What ships, and what it says: experiments of papers in tables, the datasets' bases under them, configs of our own.

  lacuna configs                          all of them
  lacuna configs cole                     a table: what it is, its rows and the numbers to reach
  lacuna configs cole:coco14_an_linear    one experiment with everything resolved, as YAML (--json: as JSON)
  lacuna configs own_images               one that ships, or a file of yours: its remarks, and everything resolved
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from typing import Any

import yaml

from lacuna.basics import storage
from lacuna.basics.places import CONFIGS
from lacuna.trainer.config.files import load_config, locate, read_body, read_table, shipped
from lacuna.trainer.config.reported import as_text
from lacuna.trainer.config.tables import Row, Table

_WIDTH = 118


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME",
                        help="a table, TABLE:ROW or another config: by name or file")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> None:
    if args.name is None:
        found = overview()
        print(json.dumps(found, indent=1, ensure_ascii=False) if args.json else _overview_text(found))
        return
    table = read_table(args.name) if locate(args.name)[1] is None else None
    if table:
        body = describe(table)
        print(json.dumps(body, indent=1, ensure_ascii=False) if args.json else _table_text(args.name, body))
        return
    body = resolved(args.name)
    print(json.dumps(body, indent=1, ensure_ascii=False) if args.json
          else heading(args.name) + yaml.safe_dump(body, sort_keys=False, allow_unicode=True).rstrip())


def heading(name: str) -> str:
    """The remarks at the top of a config's own file: what it is, and what to change."""
    path, row = locate(name)
    if row is not None:
        return ""
    lines = storage.read_bytes(path).decode().splitlines()
    count = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return "".join(f"{line}\n" for line in lines[:count])


def overview() -> dict[str, dict[str, Any]]:
    """kind → name → one line about it, and of tables the number of rows."""
    found: dict[str, dict[str, Any]] = {"tables": {}, "bases": {}, "own": {}}
    for name in shipped():
        table = read_table(name)
        if table:
            found["tables"][name] = {"about": table.about.splitlines()[0], "rows": len(table.rows)}
        else:
            kind = "bases" if name.startswith("base/") else "own"
            first = storage.read_bytes(os.path.join(CONFIGS, f"{name}.yaml")).decode().splitlines()[0]
            found[kind][name] = {"about": first.removeprefix("# ")}
    return found


def describe(table: Table) -> dict[str, Any]:
    rows = {name: {key: row[key] for key in ("reported", "note") if key in row} for name, row in table.rows.items()}
    return {"about": table.about, "source": table.source, "rows": rows}


def resolved(name: str) -> dict[str, Any]:
    """With every default; of a base, which is no experiment yet, what it sets."""
    if name.startswith("base/") and name in shipped():
        return read_body(name)
    return load_config(name, []).model_dump(mode="json")


def _overview_text(found: dict[str, dict[str, Any]]) -> str:
    titles = {"tables": "Tables: a row is trained with `lacuna train TABLE:ROW`, and `lacuna configs TABLE` lists them",
              "bases": "Bases: datasets and protocols, for `base:` in a config", "own": "Our own"}
    lines = []
    for kind, entries in found.items():
        lines += ["", titles[kind]]
        for name, entry in entries.items():
            rows = f"{entry['rows']:>3} rows  " if kind == "tables" else ""
            lines += textwrap.wrap(f"{rows}{entry['about']}", _WIDTH, initial_indent=f"  {name:<22} ",
                                   subsequent_indent=" " * (34 if rows else 25))
    return "\n".join(lines[1:])


def _table_text(name: str, body: dict[str, Any]) -> str:
    rows = {row: Row.model_validate(entry) for row, entry in body["rows"].items()}
    width = max(map(len, rows))
    lines = [body["about"].rstrip(), ""]
    lines += [f"Numbers: {body['source']}."] if body["source"] else []
    for row, entry in rows.items():
        text = as_text(entry.reported) if entry.reported is not None else "–"
        lines += textwrap.wrap(f"{text:<6}   {entry.note}".rstrip(), _WIDTH, initial_indent=f"  {row:<{width}}  ",
                               subsequent_indent=" " * (width + 4))
    return "\n".join([*lines, "", f"One of them: lacuna configs {name}:{next(iter(rows))}"])
