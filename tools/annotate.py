"""Simulated partial annotation. Labels are taken away from an existing sidecar; images and tars are not touched.

  lacuna annotate DATASET --scheme val_split                      subsets `train` and `val` (20 % of the rows)
  lacuna annotate DATASET --scheme single_positive --name single  one positive label per image
  lacuna annotate DATASET --scheme single_positive --name one_each --num-pos 1 --num-neg 1
  lacuna annotate DATASET --scheme fpc --name fpc1000 --per-class 1000
  lacuna annotate DATASET --scheme rpa --name rpa50 --p 0.5
  lacuna annotate DATASET --scheme image_fraction --name m10 --fraction 0.1 --within train
  lacuna annotate DATASET --scheme positive_fraction --name pos10 --fraction 0.1 --seed 1
  lacuna annotate DATASET --scheme graph --name kg --parents parents.tsv
  lacuna annotate DATASET --scheme groups --name video --pattern '^(.*)_[0-9]+$'    samples that belong together, by key
  lacuna annotate DATASET --scheme val_split --groups video       no group is on both sides
  lacuna annotate DATASET --list                                  sidecars and subsets that exist
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from lacuna.basics.errors import UserError
from lacuna.basics.progress import Progress
from lacuna.data_pipelines.annotation.annotate import SCHEMES, annotate, keep_rows, refuse_existing, split_rows
from lacuna.data_pipelines.annotation.labelled_rows import LabelledRows
from lacuna.data_pipelines.annotation.schemes import ImageFraction
from lacuna.data_pipelines.groups import Groups, by_pattern, by_table, group_names, make_groups
from lacuna.data_pipelines.index import ShardIndex, Sidecar, sidecar_names
from lacuna.data_pipelines.subsets import Subset, subset_names

_SPLIT, _GROUPS = "val_split", "groups"
# Options of schemes: which scheme takes which follows from the fields of its class.
_OPTIONS: dict[str, tuple[type, str]] = {
    "seed": (int, "seed of the draw (default: the published one, else 0)"),
    "num_pos": (int, "single_positive: positives kept of every image, -1 for all (default 1)"),
    "num_neg": (int, "single_positive: negatives kept of every image, -1 for all (default 0)"),
    "p": (float, "rpa: probability that an annotation is dropped (default 0.5)"),
    "per_class": (int, "fpc: positives, and negatives, kept of every class (default 1000)"),
    "fraction": (float, "val_split: share of the rows that become `val` (default 0.2); image_fraction: share of the "
                        "images; positive_fraction: share of all positives (default 0.1)"),
    "negatives": (str, "positive_fraction: `image` (default) draws negatives beside every image's own positives, "
                       "`dataset` over all images"),
    "groups": (str, "val_split: groups that are not to be split, made with --scheme groups"),
    "pattern": (str, "groups: regular expression whose first bracket is the part of a key that names its group"),
    "table": (str, "groups: file with lines `key<TAB>group`; other samples are in none"),
    "parents": (str, "graph: file with one `child<TAB>parent` line per class (class names or stable ids)"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", help="folder or URL that holds index.json")
    schemes = "; ".join(f"{name}: {scheme.summary}" for name, scheme in SCHEMES.items())
    parser.add_argument("--scheme", help=f"{_SPLIT}: subsets for training and validation (Cole et al. 2021); "
                        f"{_GROUPS}: which samples belong together; {schemes}")
    parser.add_argument("--from", dest="source", metavar="SIDECAR", default="labels",
                        help="sidecar with the true labels (default: labels)")
    parser.add_argument("--name", help=f"name of the new sidecar; with {_SPLIT}: subsets train-NAME and val-NAME")
    parser.add_argument("--within", metavar="SUBSET", help="draw among these rows only; the others know nothing")
    for name, (kind, text) in _OPTIONS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace what has the same name")
    parser.add_argument("--list", action="store_true", help="show the sidecars and subsets that exist")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> None:
    index = ShardIndex.load(args.dataset)
    if args.list:
        return _show(_overview(index), args.json)
    legal = [_SPLIT, _GROUPS, *SCHEMES]
    if args.scheme not in legal:
        raise UserError(f"--scheme {args.scheme!r}: legal are {', '.join(legal)}. See `lacuna annotate --help`.")
    within = Subset.load(index, args.within) if args.within else None
    rows = LabelledRows(index, Sidecar.load(index, args.source), within)
    if args.scheme == _GROUPS:
        return _show([_describe_groups(_groups(args, index))], args.json)
    if args.scheme == _SPLIT:
        options = _given(args, ("fraction", "seed", "groups"))
        names = tuple(f"{part}-{args.name}" if args.name else part for part in ("train", "val"))
        made = split_rows(rows, (names[0], names[1]), overwrite=args.overwrite, **options)
        return _show([_describe_subset(s) for s in made], args.json)
    cls = SCHEMES[args.scheme]
    scheme = cls(**_given(args, [f.name for f in dataclasses.fields(cls)]))
    if not args.name:
        raise UserError(f"--name: give the new sidecar a name, for example --name {args.scheme}.")
    if isinstance(scheme, ImageFraction):
        refuse_existing(args.name, subset_names(index), args.overwrite)
    with Progress(index.samples, "annotating", "rows") as meter:
        sidecar = annotate(rows, args.name, args.scheme, scheme, overwrite=args.overwrite, advance=meter.advance)
    made_things = [_describe_sidecar(sidecar)]
    if isinstance(scheme, ImageFraction):
        made_things.append(_describe_subset(keep_rows(rows, args.name, scheme, args.overwrite)))
    return _show(made_things, args.json)


def _given(args: argparse.Namespace, accepted) -> dict[str, Any]:
    """The options on the command line; one that the scheme does not know is an error, not silently ignored."""
    given = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    for name in given:
        if name not in accepted:
            flags = ", ".join("--" + a.replace("_", "-") for a in accepted)
            raise UserError(f"--{name.replace('_', '-')} means nothing to --scheme {args.scheme}; it takes {flags}.")
    return given


def _groups(args: argparse.Namespace, index: ShardIndex) -> Groups:
    given = _given(args, ("pattern", "table"))
    if len(given) != 1 or not args.name:
        raise UserError("--scheme groups needs --name NAME, and one of --pattern REGEX and --table FILE.")
    refuse_existing(args.name, group_names(index), args.overwrite)
    group_of = by_pattern(args.pattern) if args.pattern else by_table(args.table)
    return make_groups(index, args.name, group_of, given)


def _overview(index: ShardIndex) -> list[dict]:
    return ([_describe_sidecar(Sidecar.load(index, name)) for name in sidecar_names(index)]
            + [_describe_subset(Subset.load(index, name)) for name in subset_names(index)]
            + [_describe_groups(Groups.load(index, name)) for name in group_names(index)])


def _describe_sidecar(sidecar: Sidecar) -> dict:
    return {"kind": "sidecar", "name": sidecar.name, "fingerprint": sidecar.fingerprint,
            "rows": sidecar.index.samples, "positives": int(sidecar.positives.sum()),
            "negatives": int(sidecar.negatives.sum()), "source": sidecar.source}


def _describe_subset(subset: Subset) -> dict:
    return {"kind": "subset", "name": subset.name, "fingerprint": subset.fingerprint, "rows": subset.samples,
            "source": subset.source}


def _describe_groups(groups: Groups) -> dict:
    return {"kind": "groups", "name": groups.name, "fingerprint": groups.fingerprint, "groups": groups.count,
            "rows": int((groups.numbers >= 0).sum()), "source": groups.source}


def _show(made: list[dict], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"made": made}))
        return
    for thing in made:
        entries = (f", {thing['positives']:,} positives, {thing['negatives']:,} negatives"
                   if thing["kind"] == "sidecar" else f" in {thing['groups']:,}" if thing["kind"] == "groups" else "")
        places = thing["source"].get("places_fingerprint")
        print(f"{thing['kind']} {thing['name']}: {thing['rows']:,} rows{entries}, fingerprint {thing['fingerprint']}"
              + (f", places {places}" if places else ""))
