"""Looks into per-sample state: schema, sizes, compression, snapshots, histograms, and one sample's row in words.

  lacuna inspect runs/my-run                            the state of a run (or the URL of a state store)
  lacuna inspect runs/my-run --values                   also read everything for smallest, mean and largest values
  lacuna inspect runs/my-run --sample 3/17              what is remembered about row 17 of shard 3
  lacuna inspect runs/my-run --sample n03000684_12      the same by sample key
  lacuna inspect s3://bucket/state --index s3://bucket/shards/train --histograms dog cat --json
Given a run folder, class names, labels and sample keys come from its training set; for a bare store, from --index.
`lacuna state` exports, verifies and converts.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from lacuna import state_store
from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.whole_number import whole_number
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.state_store.manifest import read_histogram
from lacuna.state_store.moving import KeyTable
from lacuna.state_store.schema import is_store
from lacuna.state_store.store import StateStore
from lacuna.state_store.topk import UNTRACKED
from lacuna.state_store.verify import FieldStats, stats
from lacuna.tools.passes.parts import absolute
from lacuna.tools.run_files import run_config, state_url, while_written
from lacuna.tools.state import chosen_snapshot, require_same_index
from lacuna.trainer.run_folder import CONFIG

_BARS = " ▁▂▃▄▅▆▇█"
_SHADES = " .:-=+*#%@"
_BINS = 16
_SHOWN = 5  # strongest classes of a sample


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", help="a run folder, or the URL of a state store")
    parser.add_argument("--snapshot", help="default: the newest")
    parser.add_argument("--index", metavar="DIR", help="dataset folder (default: the run's training set)")
    parser.add_argument("--values", action="store_true", help="read all chunks for smallest, mean and largest values")
    parser.add_argument("--histograms", nargs="+", default=[], metavar="CLASS", help="also those of single classes")
    parser.add_argument("--sample", metavar="SHARD/ROW|KEY", help="show one sample's row instead of the overview")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


@dataclass(frozen=True)
class Opened:
    """A store with what is known about its samples."""

    store: StateStore
    snapshot: str
    index: ShardIndex | None
    labels: Sidecar | None

    def class_name(self, number: int) -> str:
        return self.index.classes[number] if self.index else f"class {number}"


def run(args: argparse.Namespace) -> None:
    facts = while_written(args.url, lambda: _look(args))
    text = sample_text if args.sample else overview_text
    print(json.dumps(facts, ensure_ascii=False) if args.json else text(facts))


def _look(args: argparse.Namespace) -> dict[str, Any]:
    opened = open_state(args.url, args.index, args.snapshot)
    if args.sample:
        return sample_facts(opened, *find_sample(opened, args.sample))
    return overview(opened, args.values, args.histograms)


def open_state(url: str, index_url: str | None, snapshot: str | None) -> Opened:
    """A store by its own URL or by its run's folder; the run's config says which samples it is about."""
    url = absolute(url)
    folders = (url, url.rpartition("/")[0])
    config = next((run_config(folder) for folder in folders if storage.exists(storage.join(folder, CONFIG))), None)
    if config and not is_store(url):
        url = state_url(url, config)
        if not is_store(url):
            raise UserError(f"{url}: no state store. The run's method {config.method['name']!r} keeps no per-sample "
                            "state, or it has not started (`lacuna methods` says which keep some).")
    store = state_store.open(url)
    name = chosen_snapshot(store, snapshot)
    index = ShardIndex.load(index_url) if index_url else None
    labels = None
    if index is None and config and storage.exists(storage.join(config.data.train.url, "index.json")):
        index = ShardIndex.load(config.data.train.url)
        labels = Sidecar.load(index, config.data.train.labels)
    if index is not None:
        require_same_index(index, store)
    return Opened(store, name, index, labels)


# ---- the whole store


def overview(opened: Opened, values: bool, classes: list[str]) -> dict[str, Any]:
    store, schema = opened.store, opened.store.schema
    numbers = [_class_number(opened, name) for name in classes]
    manifest = store.manifest(opened.snapshot)
    return {
        "url": store.url, "snapshot": opened.snapshot, "shards": schema.shards, "rows": int(schema.counts.sum()),
        "rows_per_shard": [int(schema.counts.min()), int(schema.counts.max())], "seed": schema.seed,
        "fingerprint": schema.fingerprint,
        "snapshots": [{"name": e.name, "created": e.created, "launch": e.launch, "meta": e.meta}
                      for e in store.snapshots()],
        "fields": [_field_facts(item) for item in stats(store, opened.snapshot, values)],
        "histograms": {name: _histogram_facts(opened, name, read_histogram(store.url, name, ref), numbers)
                       for name, ref in manifest.histograms.items()},
    }


def _class_number(opened: Opened, name: str) -> int:
    number = whole_number(name)
    if number is not None:
        return number
    if opened.index is None or name not in opened.index.classes:
        known = f"there are {', '.join(opened.index.classes[:5])}, …" if opened.index else "pass --index to use names"
        raise UserError(f"--histograms {name}: no such class; {known}. A class number works too.")
    return opened.index.classes.index(name)


def _field_facts(item: FieldStats) -> dict[str, Any]:
    ratio = item.logical_bytes / item.stored_bytes if item.stored_bytes else None
    extent = dict(zip(("smallest", "mean", "largest"), item.values, strict=True)) if item.values else None
    return {**item.field.to_json(), "bytes_per_row": item.field.row_bytes, "chunks": item.chunks,
            "written": item.written, "logical_bytes": item.logical_bytes, "stored_bytes": item.stored_bytes,
            "ratio": ratio, "values": extent}


def _histogram_facts(opened: Opened, field: str, counts: np.ndarray, numbers: list[int]) -> dict[str, Any]:
    """Coarse bins over the field's range, of all columns together and of the classes asked for."""
    wrong = [n for n in numbers if n >= len(counts)]
    if wrong:
        raise UserError(f"--histograms {wrong[0]}: field {field!r} has columns 0..{len(counts) - 1}.")
    coarse = counts.reshape(len(counts), _BINS, -1).sum(axis=2)
    return {"range": list(opened.store.schema.fields[field].range or (0, 1)), "all": coarse.sum(axis=0).tolist(),
            "classes": {opened.class_name(n): coarse[n].tolist() for n in numbers}}


def overview_text(facts: dict[str, Any]) -> str:
    lines = [f"{facts['url']}: {facts['rows']:,} rows in {facts['shards']} shards of {facts['rows_per_shard'][0]} to "
             f"{facts['rows_per_shard'][1]}, seed {facts['seed']}, for data {facts['fingerprint']}", "", "snapshots"]
    for entry in facts["snapshots"]:
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["created"]))
        mark = "→" if entry["name"] == facts["snapshot"] else " "
        lines.append(f"{mark} {entry['name']:<28} {made}  launch {entry['launch']}  {json.dumps(entry['meta'])}")
    lines += ["", f"{'field':<14} {'stored as':<24} {'starts from':<20} {'written':>13} {'MB':>9} {'on disk':>9} ratio"]
    for field in facts["fields"]:
        kind = f"{field['dtype']} {field['shape']} {field['compression']}"
        ratio = f"{field['ratio']:.2f}" if field["ratio"] else "–"
        lines.append(f"{field['name']:<14} {kind:<24} {_start(field['initial']):<20} "
                     f"{'{written} of {chunks}'.format(**field):>13} {field['logical_bytes'] / 1e6:>9.1f} "
                     f"{field['stored_bytes'] / 1e6:>9.1f} {ratio:>5}")
        if field["values"]:
            lines.append("{:14} smallest {smallest:.4g}, mean {mean:.4g}, largest {largest:.4g}".format(
                "", **field["values"]))
    for name, histogram in facts["histograms"].items():
        low, high = histogram["range"]
        lines += ["", f"histogram of {name}, {low:g} to {high:g}, logarithmic"]
        for label, counts in {"all classes": histogram["all"], **histogram["classes"]}.items():
            lines.append(f"  {label:<20.20} |{bars(counts)}|  {sum(counts):,} entries, {counts[-1]:,} in the last bin")
    return "\n".join(lines)


def _start(initial: dict[str, Any]) -> str:
    return " ".join(str(part) for part in initial.values())


def bars(counts: list[int]) -> str:
    """One character a bin, by the logarithm of its count: scores pile up at 0."""
    height = np.log1p(np.maximum(counts, 0))
    step = np.ceil(height / max(height.max(), 1e-9) * (len(_BARS) - 1)).astype(int)
    return "".join(_BARS[i] for i in step)


# ---- one sample


def find_sample(opened: Opened, text: str) -> tuple[int, int]:
    shard, slash, row = text.partition("/")
    rows = opened.store.schema.counts
    number, place = whole_number(shard), whole_number(row)
    if slash and number is not None and place is not None:
        if number >= len(rows) or place >= rows[number]:
            last = int(rows[min(number, len(rows) - 1)]) - 1
            raise UserError(f"--sample {text}: there are shards 0..{len(rows) - 1}, that one with rows 0..{last}.")
        return number, place
    if opened.index is None:
        raise UserError(f"--sample {text}: a key needs the shard index; pass --index, or write SHARD/ROW.")
    index = opened.index
    shards, places = KeyTable(lambda shard: index.members(shard).keys, len(index.shards)).find([text])
    if shards[0] < 0:
        raise UserError(f"--sample {text}: no sample of {index.url} has this key. Write SHARD/ROW, or a whole key such "
                        f"as {index.members(0).keys[0]!r}.")
    return int(shards[0]), int(places[0])


def sample_facts(opened: Opened, shard: int, row: int) -> dict[str, Any]:
    reader = opened.store.reader(opened.snapshot)
    facts: dict[str, Any] = {"shard": shard, "row": row, "snapshot": opened.snapshot}
    if opened.index:
        facts["key"] = opened.index.members(shard).keys[row]
    if opened.labels:
        labels = opened.labels.labels(shard)
        facts["positives"] = [opened.class_name(i) for i in labels.positives(row).tolist()]
        facts["negatives"] = [opened.class_name(i) for i in labels.negatives(row).tolist()]
    stored: dict[str, np.ndarray | None] = {}
    for name, field in opened.store.schema.fields.items():
        written = reader.refs.get(name, {}).get(shard) is not None
        try:
            stored[name] = field.decode(reader.read_shard(name, shard)[row : row + 1])[0]
        except UserError:
            if written:  # damaged; a Given field that was never written has nothing to read
                raise
            stored[name] = None
    facts["fields"] = {name: _described(opened, name, value, stored) for name, value in stored.items()}
    return facts


def _described(opened: Opened, name: str, value: np.ndarray | None,
               row: dict[str, np.ndarray | None]) -> dict[str, Any]:
    """A field's value in words: by class where it has a column a class, by tracked class for top-k fields."""
    if value is None:
        return {"kind": "never written", "starts_from": _start(opened.store.schema.fields[name].to_json()["initial"])}
    ids = row.get(name.removesuffix("_values") + "_ids") if name.endswith("_values") else None
    classes = len(opened.index.classes) if opened.index else None
    if ids is not None:
        columns = [int(i) for i in ids]
        names = ["untracked" if i == UNTRACKED else opened.class_name(i) for i in columns]
    elif value.ndim and value.shape[0] > 2 and classes in (None, value.shape[0]) and not name.endswith("_ids"):
        names = [opened.class_name(i) for i in range(value.shape[0])]
    else:
        return {"kind": "plain", "value": value.tolist()}
    peaks = value.reshape(len(names), -1).max(axis=1) if value.ndim > 1 else value
    order = np.argsort(-peaks.astype(np.float64), kind="stable")
    facts = {"kind": "maps" if value.ndim == 3 else "classes", "mean": float(value.mean()),
             "strongest": [[names[i], float(peaks[i])] for i in order[:_SHOWN]],
             "values": {names[i]: float(peaks[i]) for i in range(len(names)) if names[i] != "untracked"}}
    if value.ndim == 3:
        facts["map"] = {"class": names[order[0]], "values": np.round(value[order[0]], 3).tolist()}
    return facts


def sample_text(facts: dict[str, Any]) -> str:
    title = f"shard {facts['shard']}, row {facts['row']}" + (f": {facts['key']}" if "key" in facts else "")
    lines = [f"{title} (snapshot {facts['snapshot']})"]
    if "positives" in facts:
        lines.append(f"annotated positive: {', '.join(facts['positives']) or 'none'}; "
                     f"negative: {len(facts['negatives'])} classes")
    for name, field in facts["fields"].items():
        if field["kind"] == "plain":
            lines.append(f"{name}: {field['value']}")
        elif field["kind"] == "never written":
            lines.append(f"{name}: never written, starts from {field['starts_from']}")
        else:
            known = facts.get("positives", [])
            best = ", ".join(f"{cls} {peak:.3f}{' (annotated)' if cls in known else ''}"
                             for cls, peak in field["strongest"])
            lines.append(f"{name}: mean {field['mean']:.4f}; strongest {best}")
        if field["kind"] == "maps":
            lines.append(f"  {field['map']['class']}, light to dark:")
            lines += [f"  |{_shaded(row)}|" for row in field["map"]["values"]]
    return "\n".join(lines)


def _shaded(row: list[float]) -> str:
    """Two characters a cell: a character is twice as high as wide."""
    return "".join(2 * _SHADES[min(int(value * len(_SHADES)), len(_SHADES) - 1)] for value in row)
