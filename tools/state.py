"""
  lacuna state snapshots URL                          committed snapshots, oldest first
  lacuna state verify URL                             read and check every chunk; exit code 1 if anything is damaged
  lacuna state verify runs/mine/state --repair        mend metadata from their copies first, as the next launch does
  lacuna state export runs/mine                       plain Zarr for any reader, in mine-state (--to: elsewhere)
  lacuna state export runs/mine --format parquet      one table per shard, rows named by sample (or: npz, references)
  lacuna state import URL --from OUT --index DIR --name NEW      exported rows into a new snapshot, by sample key
  lacuna state reshard URL --index OLD --new-index NEW --to OUT --labels NAME    sharded anew: move state by key
  lacuna state migrate URL --to OUT --set ema.dtype=uint16 --drop phi    the same state with other fields
`lacuna inspect` shows what is in a store. URL is a store, or the folder of the run that
has one. All take the newest snapshot unless --snapshot names one. `import`,
`snapshots --delete` and `verify --repair` take over the store: a training run that is still going ends.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from lacuna import state_store
from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.fence import Hold
from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.source import ShardSource
from lacuna.state_store.copies import FORMATS, import_rows, reference_copy, row_copies, zarr_copy
from lacuna.state_store.fields import Field
from lacuna.state_store.reshard import migrate, reshard
from lacuna.state_store.schema import is_store
from lacuna.state_store.store import StateStore
from lacuna.state_store.verify import Report, verify
from lacuna.tools.run_files import read_file, run_config, run_name, state_url, while_written
from lacuna.trainer.run_folder import CONFIG


def configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def add(name: str, text: str, action: Callable[[argparse.Namespace], int | None]) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("url", help="the state store, or a run with one: a folder or any fsspec URL")
        sub.add_argument("--snapshot", help="default: the newest")
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        sub.set_defaults(call=action)
        return sub

    listing = add("snapshots", "list committed snapshots", _snapshots)
    listing.add_argument("--delete", metavar="NAME", help="delete this one and what only it uses")
    check = add("verify", "read and check every chunk of every snapshot", _verify)
    check.add_argument("--repair", action="store_true", help="first mend damaged or missing metadata from their copies")
    check.add_argument("--run", help="run folder whose checkpoints hold copies (default: the one that the store is in)")
    out = add("export", "write a snapshot for other programs", _export)
    out.add_argument("--to", metavar="OUT", help="new folder or URL (references: a .json file; default: RUN-state)")
    out.add_argument("--format", choices=["zarr", "references", *FORMATS], default="zarr", help="default: zarr")
    out.add_argument("--index", metavar="DIR", help="dataset folder with index.json: sample keys for parquet and npz "
                     "(default: what the run was trained on)")
    out.add_argument("--fields", nargs="+", help="only these (parquet and npz)")
    back = add("import", "read exported parquet or npz files into a new snapshot", _import)
    back.add_argument("--from", required=True, dest="source", metavar="OUT", help="folder with the exported files")
    back.add_argument("--index", required=True, metavar="DIR", help="dataset folder with index.json")
    back.add_argument("--name", required=True, help="of the new snapshot")
    other = add("reshard", "move state by sample key to a dataset that was sharded anew", _reshard)
    other.add_argument("--index", required=True, metavar="OLD", help="dataset folder that the state belongs to")
    other.add_argument("--new-index", required=True, metavar="NEW", help="dataset folder with the new shards")
    other.add_argument("--to", required=True, metavar="OUT", help="new store")
    other.add_argument("--labels", metavar="NAME", help="sidecar of NEW that training will use")
    other.add_argument("--subset", metavar="NAME", help="subset of NEW that training will use (default: all rows)")
    other.add_argument("--ram-gb", type=float, default=1.0, help="more RAM means fewer passes over the old store")
    new = add("migrate", "the same state with other fields, in a new store at this program's schema version", _migrate)
    new.add_argument("--to", required=True, metavar="OUT", help="new store")
    new.add_argument("--set", nargs="+", default=[], metavar="FIELD.KEY=VALUE", help="dtype, range, stochastic, …")
    new.add_argument("--drop", nargs="+", default=[], metavar="FIELD", help="fields to leave behind")


def run(args: argparse.Namespace) -> int | None:
    args.of_run = None
    if not is_store(args.url):
        args.of_run, args.url = args.url, store_of_run(args.url)
    return args.call(args)


def store_of_run(url: str) -> str:
    """Where the per-sample state of a run is; of something else, `url` itself, which is then refused."""
    if read_file(url, CONFIG) is None:
        return url
    config = run_config(url)
    found = state_url(url, config)
    if not is_store(found):
        raise UserError(f"{url}: this run has no per-sample state at {found}; its method is {config.method['name']!r}. "
                        "`lacuna methods --needs state` lists those that remember something.")
    return found


def _open(args: argparse.Namespace) -> tuple[StateStore, str]:
    store = state_store.open(args.url)
    return store, chosen_snapshot(store, args.snapshot)


def chosen_snapshot(store: StateStore, name: str | None) -> str:
    """The named snapshot, or the newest."""
    if name:
        return store.entry(name).name
    entries = store.snapshots()
    if not entries:
        raise UserError(f"{store.url}: no snapshot was ever committed, so there is nothing to read.")
    return entries[-1].name


def require_same_index(index: ShardIndex, store: StateStore) -> None:
    """A store made in training names its shards, its label sidecar and its subset; the shards are what matters here."""
    if store.schema.fingerprint.partition("-")[0] != index.fingerprint:
        raise UserError(f"{index.url}: its fingerprint is {index.fingerprint}, the state in {store.url} was made for "
                        f"{store.schema.fingerprint}. Pass the dataset that it was trained on.")


def _keys(index: ShardIndex, store: StateStore) -> Callable[[int], Sequence[str]]:
    require_same_index(index, store)
    return lambda shard: index.members(shard).keys


def _snapshots(args: argparse.Namespace) -> None:
    store = state_store.open(args.url)
    if args.delete:
        store.entry(args.delete)
        store.delete_snapshot(args.delete, store.fence.begin())
    entries = store.snapshots()
    lines = [f"{e.name:<30} {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(e.created))}  launch {e.launch}  "
             f"{json.dumps(e.meta)}" for e in entries]
    facts = [{"name": e.name, "created": e.created, "launch": e.launch, "meta": e.meta} for e in entries]
    _tell(args, {"snapshots": facts}, "\n".join(lines))


def _verify(args: argparse.Namespace) -> int:
    store = state_store.open(args.url)
    mended = _repaired(store, args.run or store.url.rpartition("/")[0] or ".") if args.repair else []
    report = while_written(args.url, lambda: _sound(state_store.open(args.url), args.snapshot))
    if args.json:
        print(json.dumps({"ok": not report.problems, "mended": mended, **asdict(report)}))
        return 1 if report.problems else 0
    for line in mended:
        print(f"mended: {line}")
    for problem in report.problems:
        print(f"{problem.kind.upper()}: {problem.text} Needed by: {', '.join(problem.snapshots) or 'all'}.")
    for kind, names in (("orphan (the next launch removes it)", report.orphans), ("foreign file", report.foreign)):
        for name in names[:20]:
            print(f"{kind}: {name}")
        if len(names) > 20:
            print(f"… and {len(names) - 20} more")
    print(f"{len(report.snapshots)} snapshots, {report.checked} chunks, {report.bytes / 1e6:.1f} MB: "
          f"{len(report.problems) or 'no'} problems")
    return 1 if report.problems else 0


def _sound(store: StateStore, snapshot: str | None) -> Report:
    """What is wrong with snapshots that are kept: a run that goes on removes others, and their files, meanwhile."""
    report = verify(store, [snapshot] if snapshot else None)
    kept = {entry.name for entry in state_store.open(store.url).snapshots()}
    report.problems = [p for p in report.problems if not p.snapshots or not kept.isdisjoint(p.snapshots)]
    return report


def _repaired(store: StateStore, run: str) -> list[str]:
    """What the next launch would do before it resumes."""
    from lacuna.trainer.checkpoints.commits import Commits
    from lacuna.trainer.checkpoints.resuming import mend  # imports torch, which the other actions do not need

    commits = Commits(storage.join(run, "checkpoints"), store.fence)
    commits.hold = Hold(store.fence, store.fence.begin())
    return mend(commits, store)


def _export(args: argparse.Namespace) -> None:
    while_written(args.url, lambda: _copied(args))


def _copied(args: argparse.Namespace) -> None:
    store, name = _open(args)
    given = None
    if args.of_run:  # shards that training has not reached yet hold nothing: what they start from is told by the config
        from lacuna.trainer.first_rows import first_rows  # torch: only this needs it

        given = first_rows(run_config(args.of_run), store.schema.fields)
    reader = store.reader(name, given)
    to = args.to or _own_name(args)
    if args.format in FORMATS:
        index = args.index or (run_config(args.of_run).data.train.url if args.of_run else None)
        if not index:
            raise UserError(f"--format {args.format} names rows by sample key: pass --index DATASET_FOLDER.")
        count = row_copies(reader, _keys(ShardIndex.load(index), store), to, args.format, args.fields)
        what = "rows"
    else:
        count = (zarr_copy if args.format == "zarr" else reference_copy)(reader, to)
        what = "chunks" if args.format == "zarr" else "references"
    _tell(args, {"to": to, "snapshot": name, what: count}, f"{to}: {count} {what} of snapshot {name}")


def _own_name(args: argparse.Namespace) -> str:
    """In this folder, after the run (of a bare store: after the folder that it is in)."""
    name = run_name(args.of_run or storage.join(args.url, ".."))
    return f"{name}-state" + (".json" if args.format == "references" else "")


def _import(args: argparse.Namespace) -> None:
    store = state_store.open(args.url)
    base = _open(args)[1] if args.snapshot or store.snapshots() else None
    moved, unplaced = import_rows(store, base, args.source, _keys(ShardIndex.load(args.index), store), args.name)
    _tell(args, {"snapshot": args.name, "imported": moved, "without_place": unplaced},
          f"{args.url}: snapshot {args.name} with {moved} rows imported; {unplaced} rows have no place in it")


def _reshard(args: argparse.Namespace) -> None:
    store, name = _open(args)
    old, new = ShardIndex.load(args.index), ShardIndex.load(args.new_index)
    if old.classes != new.classes:
        raise UserError(f"{args.new_index}: another class list than {args.index}. State is per class: keep the list.")
    _, moved, dropped = reshard(store, name, _keys(old, store), args.to, new.counts, _fingerprint(store, new, args),
                                lambda shard: new.members(shard).keys, int(args.ram_gb * 2**30))
    _tell(args, {"to": args.to, "moved": moved, "dropped": dropped, "initial": new.samples - moved},
          f"{args.to}: {moved} samples moved, {dropped} are not in {args.new_index}, "
          f"{new.samples - moved} start from initial values")


def _fingerprint(store: StateStore, new: ShardIndex, args: argparse.Namespace) -> str:
    """What training on the new shards will ask the moved store for."""
    if "-" not in store.schema.fingerprint:
        return new.fingerprint  # not made by training: it names the shards alone
    if not args.labels:
        raise UserError(f"--labels is needed: {store.url} belongs to a training run, whose state names the label "
                        f"sidecar. Give the one of {new.url} to train with, and --subset if there will be one.")
    from lacuna.trainer.sample_state import SampleState  # imports torch, which the other actions do not need

    return SampleState.fingerprint(ShardSource.load(new.url, args.labels, args.subset))


def _migrate(args: argparse.Namespace) -> None:
    store, name = _open(args)
    wanted = {field.name: field.to_json() for field in store.schema.fields.values()}
    for field in args.drop:
        if wanted.pop(field, None) is None:
            raise UserError(f"--drop {field}: no such field; the store has {sorted(store.schema.fields)}.")
    for setting in args.set:
        field, _, rest = setting.partition(".")
        key, equals, value = rest.partition("=")
        if not equals or field not in wanted or key not in wanted[field]:
            raise UserError(f"--set {setting}: write FIELD.KEY=VALUE with a field of {sorted(wanted)} and a key of "
                            f"{sorted(next(iter(wanted.values()), {}))}.")
        try:
            wanted[field][key] = json.loads(value)
        except ValueError:
            wanted[field][key] = value
    _, done = migrate(store, name, args.to, [Field.from_json(body) for body in wanted.values()])
    _tell(args, {"to": args.to, "snapshot": name, "changes": list(done)},
          "\n".join([f"{args.to}: snapshot {name}", *("  " + line for line in done)]))


def _tell(args: argparse.Namespace, facts: dict, text: str) -> None:
    if args.json:
        print(json.dumps(facts, ensure_ascii=False))
    elif text:
        print(text)
