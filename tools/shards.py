"""Examples:
  lacuna shards make coco --annotations annotations/instances_train2014.json --images train2014 --out shards/coco-train
  lacuna shards make imagenet --images ILSVRC/train --out s3://bucket/imagenet-train --resize 480
  lacuna shards make features --features f.npy --labels y.npy --out shards/features
  lacuna shards make openimages --help          the options of one reader

`make` shuffles the samples (seeded), copies image files unchanged, and writes an index and the label sidecar `labels`.
The number of shards is a multiple of --streams; a shard has at most --shard-mb megabytes and 8192 rows.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys

from data_pipelines.index import ShardIndex, Sidecar
from data_pipelines.packing import SIDECAR_NAME, SKIPPED_NAME, Layout, pack
from data_pipelines.readers import READERS
from data_pipelines.readers.base import Dataset
from tools.progress import Progress


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    make = actions.add_parser("make", help="build shards from a public dataset")
    readers = make.add_subparsers(dest="reader", required=True, metavar="READER")
    for name, reader in READERS.items():
        module = inspect.getmodule(reader.read)
        one = readers.add_parser(name, help=reader.summary, description=reader.summary + ".",
                                 epilog=module.__doc__ if module else None,
                                 formatter_class=argparse.RawDescriptionHelpFormatter)
        reader.configure(one.add_argument_group("the dataset"))
        _packing_options(one.add_argument_group("the shards"))


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


def run(args: argparse.Namespace) -> int:
    return _make(args)


def _make(args: argparse.Namespace) -> int:
    reader = READERS[args.reader]
    options = {name: getattr(args, name) for name in inspect.signature(reader.read).parameters}
    print(f"reading {args.reader} …", file=sys.stderr)
    dataset = reader.read(**options)
    layout = Layout(args.streams, args.shard_mb, args.rows_per_shard, args.seed, not args.no_shuffle)
    with Progress(len(dataset.samples), "packing", "samples") as meter:
        index = pack(dataset, args.out, layout, workers=args.workers, resize=args.resize, overwrite=args.overwrite,
                     advance=meter.advance)
    _print_summary(index, dataset, args.json)
    return 0


def _print_summary(index: ShardIndex, dataset: Dataset, as_json: bool) -> None:
    sidecar = Sidecar.load(index, SIDECAR_NAME)
    facts = {
        "out": index.url, "samples": index.samples, "shards": len(index.shards), "classes": len(index.classes),
        "rows_per_shard": [int(index.rows.min()), int(index.rows.max())], "bytes": sum(s.bytes for s in index.shards),
        "positives": int(sidecar.positives.sum()), "negatives": int(sidecar.negatives.sum()),
        "classes_without_positive": int((sidecar.positives == 0).sum()), "skipped": len(dataset.skipped),
        "fingerprint": index.fingerprint, "labels_fingerprint": sidecar.fingerprint,
    }
    if as_json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) else value
        print(f"{name.replace('_', ' '):>26}  {shown}")
    if dataset.skipped:
        print(f"{len(dataset.skipped):,} samples were left out, first: {dataset.skipped[0]}; all in "
              f"{index.url}/{SKIPPED_NAME}")
