"""Read tables of scores (samples × classes) into a state store, for methods that use a vision-language model's opinion.

  lacuna import-scores clip.npz --shards shards/coco14/train --out shards/coco14/clip
  lacuna import-scores scores.npy --keys keys.txt --classes classes.txt --shards … --out …
  lacuna import-scores global=g.npz crop_max=a.npz crop_min=b.npz --shards … --out …    # AEVLP
A table is .parquet (column `key` and one column per class, or a list column `scores`), .npz (`keys`, `scores`,
`classes`) or .npy (with --keys and --classes). Several tables go into one store under the names before the `=`; one
without a name is `scores`. Then: method.scores=shards/coco14/clip. `lacuna scores` makes such a
store itself, by CLIP and its kin, classifiers of timm and torchvision, or a run.
"""

from __future__ import annotations

import argparse
import json
import tempfile

import numpy as np

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.basics.progress import progress
from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.score_tables import ScoreTable, read_table
from lacuna.data_pipelines.subsets import Subset
from lacuna.state_store.fields import Field
from lacuna.state_store.moving import BulkWriter, KeyTable
from lacuna.state_store.schema import is_store, mend_schema
from lacuna.state_store.store import StateStore

SNAPSHOT = "imported"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tables", nargs="+", metavar="[NAME=]TABLE", help=".parquet, .npz or .npy")
    parser.add_argument("--shards", required=True, metavar="URL", help="dataset folder with index.json")
    parser.add_argument("--out", required=True, metavar="URL", help="the new state store")
    parser.add_argument("--keys", metavar="FILE", help="sample keys of the table's rows, one per line (.npy)")
    parser.add_argument("--classes", metavar="FILE", help="class names of the table's columns, one per line")
    parser.add_argument("--subset", metavar="NAME", help="only rows of this subset must be in the table; others are 0")
    parser.add_argument("--reorder", action="store_true", help="columns may be in another order than the dataset's")
    parser.add_argument("--dtype", choices=["float16", "float32"], default="float16", help="as stored")
    parser.add_argument("--scratch", metavar="DIR", help="folder for one copy of the tables meanwhile")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> None:
    index = ShardIndex.load(args.shards)
    subset = Subset.load(index, args.subset) if args.subset else None
    table_of = KeyTable(lambda shard: index.members(shard).keys, len(index.shards))
    with tempfile.TemporaryDirectory(dir=args.scratch, prefix="lacuna-scores-") as scratch:
        placed = {}
        for text in args.tables:
            name, equals, path = text.partition("=")
            name, path = (name, path) if equals else ("scores", text)
            if name in placed:
                raise UserError(f"{text}: two tables are named {name!r}. Write NAME=TABLE with different names.")
            table = read_table(path, scratch, args.keys, args.classes)
            placed[name] = Placed(table, index, table_of, subset, args.reorder)
        fields = [Field(name, (len(index.classes),), args.dtype) for name in placed]
        writer = BulkWriter(new_store(args.out, index, fields))
        for shard in progress(range(len(index.shards)), len(index.shards), "importing", "shards"):
            for name, source in placed.items():
                writer.write(name, shard, source.rows(shard, np.dtype(args.dtype)))
        writer.commit(SNAPSHOT, {"tables": {name: source.table.path for name, source in placed.items()}})
    report = {"store": args.out, "samples": index.samples, "classes": len(index.classes),
              "tables": {name: {"rows": len(source.table.keys), "unused": source.unused}
                         for name, source in placed.items()}}
    if args.json:
        print(json.dumps(report))
        return
    for name, source in placed.items():
        print(f"{args.out}: {name} for {index.samples:,} samples × {len(index.classes):,} classes from "
              f"{source.table.path}; {source.unused:,} of its rows are of other samples")


def new_store(url: str, index: ShardIndex, fields: list[Field]) -> StateStore:
    """Made now, or left without a snapshot by an import that failed."""
    if not is_store(url):
        return state_store.create(url, index.counts, index.fingerprint, fields)
    store = state_store.open(url, index.counts, index.fingerprint, fields)
    if store.snapshots():
        raise UserError(f"--out {url}: there is already a store. Choose another URL, or delete it first.")
    mend_schema(url, store.schema)  # a kill may have come before the last file of it
    return store


class Placed:
    """A table and where each of its rows belongs."""

    def __init__(self, table: ScoreTable, index: ShardIndex, table_of: KeyTable, subset: Subset | None, reorder: bool):
        self.table, self.index = table, index
        self.columns = table.columns_for(index, reorder)
        first = np.concatenate([[0], np.cumsum(index.counts)])
        shards, rows = table_of.find(table.keys)
        used = np.flatnonzero(shards >= 0)
        self.unused = len(shards) - len(used)
        ordinal = first[shards[used]] + rows[used]
        times = np.bincount(ordinal, minlength=index.samples)
        if times.max(initial=0) > 1:
            key = table.keys[used[np.flatnonzero(times[ordinal] > 1)[0]]]
            raise UserError(f"{table.path}: key {key!r} twice; {int((times > 1).sum())} samples have several rows. "
                            "Leave one row of each.")
        source = np.full(index.samples, -1, np.int64)
        source[ordinal] = used
        self.source = np.split(source, first[1:-1])
        self._check_missing(subset)

    def _check_missing(self, subset: Subset | None) -> None:
        missing = 0
        example = None
        for shard, source in enumerate(self.source):
            lacking = (source < 0) if subset is None else (source < 0) & subset.mask(shard)
            missing += int(lacking.sum())
            if example is None and lacking.any():
                example = self.index.members(shard).keys[int(np.flatnonzero(lacking)[0])]
        if missing:
            raise UserError(f"{self.table.path}: no row for {missing} of {self.index.samples} samples of "
                            f"{self.index.url}, e.g. key {example!r}. Its own keys look like "
                            f"{self.table.keys[0] if self.table.keys else ''!r}; --subset NAME asks for fewer samples.")

    def rows(self, shard: int, dtype: np.dtype) -> np.ndarray:
        """Stored rows of one shard; samples that the table may leave out are 0."""
        source = self.source[shard]
        there = source >= 0
        out = np.zeros((len(source), len(self.index.classes)), dtype)
        taken = np.asarray(self.table.values[source[there]])
        with np.errstate(over="ignore"):  # what does not fit becomes infinite, which is named below
            out[there] = taken if self.columns is None else taken[:, self.columns]
        bad = np.argwhere(~np.isfinite(out))
        if len(bad):
            row, column = bad[0]
            raise UserError(f"{self.table.path}: the score of sample {self.index.members(shard).keys[row]!r} for class "
                            f"{self.index.classes[column]!r} is NaN, infinite or beyond {dtype}. Repair the table.")
        return out
