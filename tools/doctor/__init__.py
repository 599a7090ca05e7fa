"""Looks at what training will meet on this machine, one line a fact: ok, warning or problem, and what to do.

  lacuna doctor                          everything; disk speed is measured in the current folder
  lacuna doctor --quick                  without what takes seconds (disk speed, starting Ray)
  lacuna doctor --folder /data/runs --s3 s3://bucket/prefix      the places that runs will use
  lacuna doctor --json                   the same for programs
Exit code 0 if nothing is a problem (warnings are allowed), 1 otherwise. --s3 writes and deletes one small object.
"""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict

from lacuna.basics.errors import UserError
from lacuna.tools.doctor.advisories import advisories
from lacuna.tools.doctor.finding import OK, PROBLEM, WARNING, Finding
from lacuna.tools.doctor.machine import accelerators, bf16, file_limit, host_name, processor, shared_memory
from lacuna.tools.doctor.software import deepspeed_ops, namesake, ray_starts, versions
from lacuna.tools.doctor.storage_places import disk_speed, object_storage, space


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", default=".", help="place of runs and shards; its disk is measured (default: .)")
    parser.add_argument("--s3", metavar="URL", help="any fsspec URL that must be reachable, e.g. s3://bucket/prefix")
    parser.add_argument("--quick", action="store_true", help="leave out disk speed and starting Ray")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    if not os.path.isdir(args.folder):
        raise UserError(f"--folder {args.folder}: no such folder. Make it, or name one that exists.")
    findings = []
    for check in checks(args):
        for finding in _guarded(check):
            findings.append(finding)
            if not args.json:
                print(as_line(finding), flush=True)
    counts = {level: sum(f.level == level for f in findings) for level in (OK, WARNING, PROBLEM)}
    if args.json:
        print(json.dumps({"ok": not counts[PROBLEM], "counts": counts, "checks": [asdict(f) for f in findings]}))
    else:
        print(f"{counts[OK]} ok, {counts[WARNING]} warnings, {counts[PROBLEM]} problems")
    return 1 if counts[PROBLEM] else 0


def checks(args: argparse.Namespace) -> list[Callable[[], Iterator[Finding]]]:
    found: list[Callable[[], Iterator[Finding]]] = [
        versions, advisories, namesake, processor, accelerators, bf16, lambda: space(args.folder), shared_memory,
        file_limit, host_name, deepspeed_ops]
    if not args.quick:
        found += [lambda: disk_speed(args.folder), ray_starts]
    if args.s3:
        found.append(lambda: object_storage(args.s3))
    return found


def as_line(finding: Finding) -> str:
    line = f"{finding.level:<8} {finding.check:<14} {finding.found}"
    wrapped = textwrap.wrap(finding.advice, 90, initial_indent=" " * 24 + "→ ", subsequent_indent=" " * 26)
    return "\n".join([line, *wrapped])


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A check that fails in a way nobody thought of is a finding too, not the end of the examination."""
    try:
        yield from check()
    except Exception as error:
        name = getattr(check, "__name__", "").strip("<>").replace("_", " ")
        yield Finding(name, PROBLEM, f"{type(error).__name__}: {error}", "Report this with the full output.")
