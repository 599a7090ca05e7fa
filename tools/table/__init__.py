"""A table of experiments, trained: every row with every seed, and ours beside what the paper reports.

  lacuna table cole --rows 'coco14_*' --seeds 3                 rows by pattern, with the search that the paper had
  lacuna table cole --rows 'coco14_*_linear' --no-search        each row with the settings that it names
  lacuna table my.yaml data.workers=4 --workers 4 --out runs/mine      a table of yours, with changes to every row
  lacuna table cole --show                                      what is there by now; nothing is trained
Where the paper searched (`search:` in the table), all combinations are trained without the test set, the one with the
best validation mAP goes on with every seed, and only those are tested. The same command goes on where it was
interrupted; rows whose data or weights are not there are named with what is missing. Markdown is printed, and written
with HTML into the folder (--out, default runs/tables/NAME), which also holds every run.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.tools.table.page import as_html, as_markdown
from lacuna.tools.table.rows import RowWork
from lacuna.tools.table.work import train_rows
from lacuna.tools.trials.crew import CrewSettings, add_crew_arguments, crew_settings
from lacuna.trainer.config.files import changed, locate, parse_overrides, read_body, read_table
from lacuna.trainer.config.tables import Table, closest, pick, searched

TAKES_OVERRIDES = True


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", help="a table: YAML file, or the name of one that ships (`lacuna configs`)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to every row")
    parser.add_argument("--rows", nargs="+", default=["*"], metavar="PATTERN", help="names of rows, with * and ? "
                        "(default: all)")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="trainings of each row (default 1)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="default 0")
    parser.add_argument("--no-search", action="store_true", help="train rows as they stand, also where the paper "
                        "searched")
    parser.add_argument("--out", help="folder or URL for runs and results (default: runs/tables/NAME)")
    parser.add_argument("--show", action="store_true", help="train nothing, print what is there")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of Markdown")
    add_crew_arguments(parser)


def run(args: argparse.Namespace) -> None:
    table = read_table(args.table) if locate(args.table)[1] is None else None
    if table is None:
        raise UserError(f"{args.table}: not a table, it has no rows. `lacuna configs` lists tables; one row of a table "
                        "is trained with `lacuna train TABLE:ROW`.")
    if args.seeds < 1:
        raise UserError(f"--seeds {args.seeds}: must be 1 or more.")
    # What follows --rows may also be settings: a row has no = in its name.
    overrides = [*args.overrides, *(word for word in args.rows if "=" in word)]
    names = chosen_rows(table, [word for word in args.rows if "=" not in word] or ["*"], args.table)
    name = os.path.basename(args.table).removesuffix(".yaml").removesuffix(".yml")
    out = args.out or os.path.join("runs", "tables", name)
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    body = fill(args.table, table, names, out, seeds, overrides, not args.no_search, crew_settings(args),
                train=not args.show)
    body = {"table": name, **body}
    storage.write_atomic(storage.join(out, "table.md"), as_markdown(body).encode())
    storage.write_atomic(storage.join(out, "table.html"), as_html(body).encode())
    print(json.dumps(body, ensure_ascii=False) if args.json else as_markdown(body))


def chosen_rows(table: Table, patterns: list[str], where: str) -> list[str]:
    """In the table's order; a pattern that fits nothing is a mistake."""
    for pattern in patterns:
        if not fnmatch.filter(table.rows, pattern):
            raise UserError(f"--rows {pattern}: no row of {where} fits; {closest(pattern, table.rows, 'rows')}")
    return [name for name in table.rows if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]


def fill(source: str, table: Table, names: list[str], out: str, seeds: range, overrides: list[str], search: bool,
         settings: CrewSettings, train: bool = True) -> dict:
    """Train what is not there yet; the table with ours beside the reported numbers."""
    changes = parse_overrides(overrides)
    rows = [RowWork(name, pick(table, name, source).row, changed(read_body(f"{source}:{name}"), changes),
                    searched(table, name) if search else [], f"{source}:{name}") for name in names]
    train_rows(rows, out, seeds, settings, train)
    return {"about": table.about, "source": table.source, "rows": [row.as_dict(seeds) for row in rows]}
