"""Examples:
  lacuna shards make coco --annotations annotations/instances_train2014.json --images train2014 --out shards/coco-train
  lacuna shards make imagenet --images ILSVRC/train --out s3://bucket/imagenet-train --resize 480
  lacuna shards make features --features f.npy --labels y.npy --out shards/features
  lacuna shards make openimages --help          the options of one reader
  lacuna shards index tars --classes classes.txt      index WebDataset tars made elsewhere
  lacuna shards check shards/coco-train               exit code 1 if anything is wrong

`make` shuffles the samples (seeded), copies image files unchanged, and writes an index and the label sidecar `labels`.
The number of shards is a multiple of --streams; a shard has at most --shard-mb megabytes and 8192 rows.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from dataclasses import asdict

from lacuna.basics.progress import Progress
from lacuna.data_pipelines import indexing
from lacuna.data_pipelines.index import UNLISTED_WORDS, ShardIndex, Sidecar
from lacuna.data_pipelines.packing import SIDECAR_NAME, SKIPPED_NAME, Layout, pack
from lacuna.data_pipelines.readers import READERS

_SHOWN = 50


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    make = actions.add_parser("make", help="build shards from a public dataset")
    readers = make.add_subparsers(dest="reader", required=True, metavar="READER")
    for name, reader in READERS.items():
        module = inspect.getmodule(reader.read)
        example = f"Example:\n  lacuna shards make {name} {reader.example}"
        one = readers.add_parser(name, help=reader.summary, description=reader.summary + ".",
                                 epilog=f"{module.__doc__ if module else ''}\n{example}".lstrip(),
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
        reader.configure(one.add_argument_group("the dataset"))
        _packing_options(one.add_argument_group("the shards"))
    text = "index WebDataset tars made elsewhere"
    _index_options(actions.add_parser("index", help=text, description=text + ".", epilog=indexing.__doc__,
                                      formatter_class=argparse.RawDescriptionHelpFormatter))
    text = "verify shards, index and labels, and decode every sample"
    checks = actions.add_parser("check", help=text, description=text + ".")
    checks.add_argument("folder", help="folder or URL with an index.json")
    checks.add_argument("--no-decode", action="store_true", help="only compare tables, tars and labels")
    checks.add_argument("--workers", type=int, default=0, help="shards checked at the same time (default: 1 a core)")
    checks.add_argument("--json", action="store_true", help="print everything found as one JSON object")


def _packing_options(group) -> None:
    group.add_argument("--out", required=True, metavar="DIR", help="new folder, or fsspec URL such as s3://bucket/name")
    group.add_argument("--seed", type=int, default=0, help="of the global shuffle (default: 0)")
    group.add_argument("--no-shuffle", action="store_true", help="keep the source's order (evaluation sets)")
    group.add_argument("--streams", type=int, default=16, help="the shard count is a multiple of this (default: 16)")
    group.add_argument("--shard-mb", type=float, default=128.0, help="largest tar, about (default: 128)")
    group.add_argument("--rows-per-shard", type=int, help="at most so many samples a shard (default: by size)")
    group.add_argument("--resize", type=int, metavar="PX", help="re-encode with a shorter edge of at most PX pixels")
    group.add_argument("--workers", type=int, default=0, help="shards written at the same time (default: 2 a core)")
    group.add_argument("--overwrite", action="store_true", help="replace a finished dataset in --out")
    group.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def _index_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", help="folder or URL with the tars; the index is written beside them")
    parser.add_argument("--classes", metavar="FILE", help="class list, `name` or `id<TAB>name` a line")
    parser.add_argument("--split", default="train", help="name to record (default: train)")
    parser.add_argument("--unlisted", choices=sorted(UNLISTED_WORDS), default="unknown",
                        help="what a class that a sample does not list is (default: unknown)")
    parser.add_argument("--labels-from", choices=indexing.LABEL_EXTENSIONS, help="read only this kind of label member")
    parser.add_argument("--allow-unlabelled", action="store_true", help="samples without labels are all unknown")
    parser.add_argument("--workers", type=int, default=0, help="tars read at the same time (default: 2 a core)")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object")


def run(args: argparse.Namespace) -> int:
    return {"make": _make, "index": _index, "check": _check}[args.action](args)


def _index(args: argparse.Namespace) -> int:
    options = indexing.IndexOptions(args.classes, args.split, args.unlisted, args.labels_from, args.allow_unlabelled)
    with Progress(None, "indexing", "tars") as meter:
        index = indexing.index_tars(args.folder, options, workers=args.workers, advance=meter.advance)
    _print_summary(index, [], args.json)
    return 0


def _check(args: argparse.Namespace) -> int:
    from lacuna.data_pipelines import checking  # imports torch, which the other actions do not need

    with Progress(ShardIndex.load(args.folder).samples, "checking", "samples") as meter:
        report = checking.check(args.folder, decode=not args.no_decode, workers=args.workers, advance=meter.advance)
    if args.json:
        print(json.dumps({"ok": not report.problems, **asdict(report)}))
        return 1 if report.problems else 0
    for word, found in (("problem", report.problems), ("warning", report.warnings)):
        for problem in found[:_SHOWN]:
            print(f"{word}: {problem}")
        if len(found) > _SHOWN:
            print(f"… and {len(found) - _SHOWN:,} more {word}s; --json lists all")
    print(f"{report.samples:,} samples in {report.shards:,} shards, sidecars {', '.join(report.sidecars) or 'none'}: "
          f"{len(report.problems):,} problems, {len(report.warnings):,} warnings")
    return 1 if report.problems else 0


def _make(args: argparse.Namespace) -> int:
    reader = READERS[args.reader]
    options = {name: getattr(args, name) for name in inspect.signature(reader.read).parameters}
    print(f"reading {args.reader} …", file=sys.stderr)
    dataset = reader.read(**options)
    layout = Layout(args.streams, args.shard_mb, args.rows_per_shard, args.seed, not args.no_shuffle)
    with Progress(len(dataset.samples), "packing", "samples") as meter:
        index = pack(dataset, args.out, layout, workers=args.workers, resize=args.resize, overwrite=args.overwrite,
                     advance=meter.advance)
    _print_summary(index, dataset.skipped, args.json)
    return 0


def _print_summary(index: ShardIndex, skipped: list[str], as_json: bool) -> None:
    sidecar = Sidecar.load(index, SIDECAR_NAME)
    facts = {
        "out": index.url, "samples": index.samples, "shards": len(index.shards), "classes": len(index.classes),
        "rows_per_shard": [int(index.counts.min()), int(index.counts.max())],
        "bytes": sum(s.bytes for s in index.shards),
        "positives": int(sidecar.positives.sum()), "negatives": int(sidecar.negatives.sum()),
        "classes_without_positive": int((sidecar.positives == 0).sum()), "skipped": len(skipped),
        "fingerprint": index.fingerprint, "labels_fingerprint": sidecar.fingerprint,
    }
    # What the reader counted: rows of other classes, contradictions and the like.
    facts |= {name: value for name, value in index.source.items() if isinstance(value, int)}
    if as_json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        print(f"{name.replace('_', ' '):>26}  {shown}")
    if skipped:
        print(f"{len(skipped):,} samples were left out, first: {skipped[0]}; all in "
              f"{index.url}/{SKIPPED_NAME}")
