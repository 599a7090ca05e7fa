"""A small web app on this machine over a run's data and state: look at images, accept or reject suggested labels.

  lacuna explore runs/my-run                      open the address that it prints in a browser
  lacuna explore runs/my-run --port 0             any free port
  lacuna explore s3://bucket/runs/my-run          a run on object storage
  lacuna explore runs/my-run --labels suggested   another sidecar of the same training set
  lacuna explore runs/my-run --scores shards/clip   beliefs of another model: a table of `lacuna scores`
  lacuna explore runs/my-run --host 192.168.0.7   for several people in one network; each gives a name
  lacuna explore runs/my-run --public-url https://labels.example.org/     behind a proxy that encrypts
Views: the most likely missing labels, annotated labels that the model disagrees with, the samples of a class, the
questions that `lacuna select RUN` chose, and with several people second looks and conflicts. A contact sheet of a class
or one image at a time. Keys: a accept, r reject, s skip, u undo, y redo, A the whole row, N reject what is left of an
image, arrows or j and k to move, Enter sheet or image, h heatmap, ? all keys. Nobody is shown what another is at work
on. Only who has the address with its token gets in.
Decisions are kept in RUN/explore/, the app exports them there as CSV or Parquet, or as a sidecar to train with
(data.train.labels=NAME). For a run on object storage that folder is here: NAME-xxxxxxxx/explore/, and a sidecar goes to
the training set.
Beliefs come from the newest snapshot of the state; for methods that remember no scores, from one pass of the best
checkpoint on Ray. Indexes are built once a snapshot, by one pass over the shards. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.explore.columns import Beliefs, Columns, build
from lacuna.tools.explore.decisions import Decisions
from lacuna.tools.explore.desk import Desk, Newest
from lacuna.tools.explore.gate import LOOPBACK, check_addresses, is_loopback
from lacuna.tools.explore.server import make_server
from lacuna.tools.heatmaps.seen import Looks, keeps_heatmaps
from lacuna.tools.passes.parts import fingerprint_of
from lacuna.tools.passes.pool import add_pool_arguments, open_pool, pool_settings
from lacuna.tools.passes.scoring import ScoreJob, shard_rows
from lacuna.tools.passes.tables import TableParts
from lacuna.tools.passes.trained import held
from lacuna.tools.report.beliefs import belief_field, state_view
from lacuna.tools.report.recorded_run import RecordedRun
from lacuna.tools.run_files import output_folder, while_written


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="run folder or URL")
    parser.add_argument("--port", type=int, default=8753, help="default 8753; 0 takes a free one")
    parser.add_argument("--host", default=LOOPBACK, metavar="ADDRESS", help="address of this machine to listen at "
                        "(default 127.0.0.1: this machine alone)")
    parser.add_argument("--public-url", metavar="URL", help="address that people open, if a proxy stands before this")
    parser.add_argument("--labels", metavar="NAME", help="sidecar of the training set (default: the run's)")
    parser.add_argument("--scores", metavar="TABLE", help="beliefs from this table (`lacuna scores`, `lacuna "
                        "import-scores`) instead of the run's own")
    parser.add_argument("--index-only", action="store_true", help="build the indexes and end")
    parser.add_argument("--json", action="store_true", help="print the address and facts as one JSON object")
    add_pool_arguments(parser)


def run(args: argparse.Namespace) -> None:
    check_addresses(args.host, args.public_url)
    desk = while_written(args.run, lambda: open_desk(args.run, args.labels, args))
    desk.shared = args.public_url is not None or not is_loopback(args.host)
    if args.index_only:
        print(json.dumps(desk.columns.facts) if args.json else f"{desk.columns.folder}: indexes are ready")
        return
    with make_server(desk, args.port, args.host, args.public_url) as server:
        gate = server.gate
        if not gate.encrypted:
            print("lacuna explore: the connection is not encrypted: who can read the network sees the token, images "
                  "and labels. Use it in a network that you trust, or behind a proxy with TLS (--public-url https://…).",
                  file=sys.stderr)
        facts = {"address": gate.address, **desk.columns.facts}
        print(json.dumps(facts) if args.json else f"{gate.address}  (Ctrl-C ends)", flush=True)
        server.serve_forever()


def open_desk(path: str, labels: str | None, args: argparse.Namespace) -> Desk:
    folder = RecordedRun.open(path)
    split = folder.config.data.train
    source = ShardSource.load(split.url, labels or split.labels, split.subset, folder.config.data.scratch)
    home = os.path.join(output_folder(folder.path), "explore")
    os.makedirs(home, exist_ok=True)
    origin, beliefs = _beliefs(folder, source, home, args)
    facts = {"origin": origin, "index": source.index.fingerprint, "labels": source.sidecar.fingerprint,
             "samples": int(source.counts.sum())}
    place = os.path.join(home, "columns-" + fingerprint_of(**facts))
    columns = Columns.open(place) or build(place, source, beliefs, facts)
    store = folder.store
    heat = Newest(store) if store is not None and keeps_heatmaps(store) and store.snapshots() else None
    decisions = Decisions(os.path.join(home, f"decisions-{source.sidecar.name}.jsonl"), source.sidecar)
    return Desk(folder.name, source, columns, beliefs, heat, Looks(folder.config, source), decisions)


def _beliefs(folder: RecordedRun, source: ShardSource, home: str, args: argparse.Namespace) -> tuple[str, Beliefs]:
    """(what they are, a shard's beliefs): of a table, of the state, else the scores of a pass that is kept."""
    if args.scores:
        table = TableParts(args.scores, source, "--scores")
        return f"table {table.table.entry.sha256[:16]} of {args.scores}", lambda number: _of_part(table.read(number))
    store, field = folder.store, belief_field(folder.store)
    if store is not None and field is not None and store.snapshots():
        newest = store.snapshots()[-1].name
        return f"state field {field} of snapshot {newest}", state_view(store, newest, field, source).shard
    rows = shard_rows(source)
    if not rows:
        raise UserError(f"{source.index.url}: no sample takes part.")
    settings = pool_settings(args)
    with held(folder.path, settings.folder) as trained, open_pool(settings) as pool:
        parts = pool.run(ScoreJob(trained, source), rows, args.parts or os.path.join(home, "scores"), "scoring")
    return f"scores of {os.path.basename(trained.checkpoint)}", lambda number: _of_part(parts.read(number))


def _of_part(part: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return part["scores"], part["rows"]
