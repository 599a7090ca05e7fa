"""The state store against bare loops on this machine: speed of an epoch, of a step and of a snapshot, and memory.

Keys of "ratios" (targets in brackets; each is measured within one run, contenders taking turns, medians):
  vs_bare_loop             an epoch's logical MB/s ÷ a loop that reads, decodes, encodes and writes the same chunks as
                           plain files with the same codec and threads [≥ 0.75]
  vs_bare_loop_histogram   the same with a 256-bin histogram per class of the scores kept on the way
  gather_scatter_vs_numpy  gather + scatter of a 256-row batch ÷ the same two numpy fancy-index copies [≤ 2.5]
  quantize_us_per_row      rounding 1000 scores to uint8 stochastically, microseconds a row
  step_slowdown            50 ms steps of a device with state I/O behind ÷ without, in the trainer's order: the host
                           gathers the next rows and scatters the last ones while the device works [≤ 1.03]
  step_slowdown_waiting    the same where the host waits for the device, as a training on CPU cores does
  rss_growth               peak memory at 1,000,000 samples ÷ at 100,000 [≤ 1.1]; rss_within_bound: 1 if both are below
                           memory after imports + RAM budget + 300 MB
  vs_best_peer             time of an epoch and its snapshot on the fastest of zarr, zarrs' pipeline, tensorstore and
                           icechunk ÷ ours, the same pattern and codec [≥ 1.0]; vs_memmap: the same against a plain
                           memmap, which neither compresses nor keeps snapshots
  snapshot_seconds         snapshot of 10,000 shards, 1 % dirty, without the write of the dirty data [≤ 2]
Fields are ImageNet-like: ROLE's φ float16[1000] with two float32 moments, scores uint8[1000], heatmaps uint8[10,14,14]
with ids. --quick uses fewer shards, and narrower fields for the memory test.
Keys of "checks" say that the contenders did the same work; each must be 0:
  different_chunks         of the bare loop's files whose rows are not the store's after the same epochs
  different_histograms     columns whose histogram is not the count of the stored rows
  different_rows           rows of a field that gather and scatter left other than the numpy copies did
  different_stores         of the peers, how many end with other rows than ours
`details.peers` has for each: seconds, bytes on disk with one snapshot, peak memory, and what a new process finds after
a SIGKILL in the middle of an epoch (`shards_ahead_of_snapshot`: rows newer than the checkpoint, hence counted twice).
  changed_by_steps         1 if steps that write what they read changed any row
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.state_store.fields import Field
from lacuna.tools.bench.peers import Peers
from lacuna.tools.bench.state import beside, parts


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", help="where to put the test stores (default: the system's temporary folder)")
    parser.add_argument("--only", nargs="+", choices=sorted(PARTS), help="measure only these parts")
    parser.add_argument("--shards", type=int, help="of each store (default 64, quick: 12 or 20; snapshot: 10000)")
    parser.add_argument("--rows", type=int, default=1000, help="samples per shard (default 1000)")
    parser.add_argument("--width", type=int, help="classes (default 1000; memory, quick: 32)")
    parser.add_argument("--rounds", type=int, help="turns of the contenders (default 3 to 5)")
    parser.add_argument("--steps", type=int, help="of a turn (default 150, quick: 40)")
    parser.add_argument("--step-ms", type=float, default=50, help="that a step computes (default 50)")
    parser.add_argument("--samples", type=int, nargs=2, default=(100_000, 1_000_000), metavar=("SMALL", "LARGE"),
                        help="of the memory test (default 100000 1000000)")


def run(quick: bool, args: argparse.Namespace) -> dict:
    for flag in ("shards", "rows", "width", "rounds", "steps"):
        if getattr(args, flag) is not None and getattr(args, flag) < 1:
            raise UserError(f"--{flag} {getattr(args, flag)}: give a number above 0.")
    if min(args.samples) < args.rows:
        raise UserError(f"--samples {' '.join(map(str, args.samples))}: give two numbers of at least one shard's rows "
                        f"({args.rows}).")
    folder = tempfile.mkdtemp(prefix="lacuna-bench-state-", dir=args.folder)
    found = Found()
    try:
        for name in args.only or PARTS:
            started = time.perf_counter()
            PARTS[name](quick, args, f"{folder}/{name}", found)
            shutil.rmtree(f"{folder}/{name}", ignore_errors=True)
            print(f"{name}: {time.perf_counter() - started:.1f} s", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for key, value in {**found.ratios, **found.details, **found.checks}.items():
        print(f"  {key}: {value}")
    return {"ratios": found.ratios, "details": found.details, "checks": found.checks}


@dataclass(frozen=True)
class Found:
    ratios: dict[str, float] = field(default_factory=dict)
    details: dict[str, object] = field(default_factory=dict)
    checks: dict[str, int] = field(default_factory=dict)


def _epoch(quick: bool, args: argparse.Namespace, folder: str, found: Found) -> None:
    shards, rounds = args.shards or (12 if quick else 64), args.rounds or 5
    found.checks["different_chunks"] = found.checks["different_histograms"] = 0
    for histogram in (False, True):
        fields = parts.imagenet_fields(args.width or 1000, histogram)
        name = "vs_bare_loop_histogram" if histogram else "vs_bare_loop"
        store = state_store.create(f"{folder}/{name}", [args.rows] * shards, "bench", fields)
        logical = 2 * store.schema.shard_bytes * shards / 1e6
        with store.session(store.begin_launch(), budget=8 * store.schema.shard_bytes + (64 << 20)) as session:
            parts.fill(session)
            plain = parts.BareLoop(f"{folder}/{name}-plain", session)
            ours: list[float] = []
            bare: list[float] = []
            for turn in range(rounds):
                contenders = [(ours, lambda: parts.sequential_epoch(session)), (bare, plain.epoch)]
                for times, call in contenders[:: 1 if turn % 2 else -1]:
                    started = time.perf_counter()
                    call()
                    times.append(time.perf_counter() - started)
            found.checks["different_chunks"] += plain.different_chunks()
            if histogram:
                found.checks["different_histograms"] += parts.different_histograms(session)
        found.ratios[name] = round(statistics.median(b / o for o, b in zip(ours, bare, strict=True)), 3)
        found.details[name + "_mb_per_s"] = [round(logical / statistics.median(times)) for times in (ours, bare)]
        shutil.rmtree(f"{folder}/{name}")
        shutil.rmtree(f"{folder}/{name}-plain")


def _batch(quick: bool, args: argparse.Namespace, folder: str, found: Found) -> None:
    store = state_store.create(folder, [args.rows] * 8, "bench", parts.imagenet_fields(args.width or 1000))
    rng = np.random.default_rng(0)
    with store.session(store.begin_launch(), budget=9 * store.schema.shard_bytes) as session:
        parts.fill(session)
        for shard in range(8):
            session.lease(shard)
        everything = session.at(np.repeat(np.arange(8), args.rows), np.tile(np.arange(args.rows), 8))
        plain = {name: everything.gather(name) for name in store.schema.fields}
        ours, bare = [], []
        for _ in range(args.steps or (60 if quick else 300)):
            shards, rows = rng.integers(0, 8, 256), rng.integers(0, args.rows, 256)
            started = time.perf_counter()
            batch = session.at(shards, rows)
            values = {name: batch.gather(name) for name in plain}
            for name, value in values.items():
                batch.scatter(name, value)
            ours.append(time.perf_counter() - started)
            del values
            started = time.perf_counter()
            index = shards * args.rows + rows
            copies = {name: flat[index] for name, flat in plain.items()}
            for name, value in copies.items():
                plain[name][index] = value
            bare.append(time.perf_counter() - started)
            del copies
        found.checks["different_rows"] = sum(
            int((everything.gather(name) != flat).reshape(len(flat), -1).any(axis=1).sum())
            for name, flat in plain.items())
        found.ratios["gather_scatter_vs_numpy"] = round(statistics.median(ours) / statistics.median(bare), 3)
        found.details["gather_scatter_us"] = [round(1e6 * statistics.median(t)) for t in (ours, bare)]


def _quantize(quick: bool, args: argparse.Namespace, folder: str, found: Found) -> None:
    values = np.random.default_rng(0).random((256, 1000), dtype=np.float32)
    shards, rows = np.zeros(256, np.int64), np.arange(256)
    for key, spec in (("quantize", Field("ema", (1000,), "uint8", range=(0, 1), stochastic=True)),
                       ("quantize_half", Field("phi", (1000,), "float16", stochastic=True)),
                       ("quantize_nearest", Field("near", (1000,), "uint8", range=(0, 1)))):
        times = []
        for epoch in range(args.steps or 100):
            started = time.perf_counter()
            spec.encode(values, spec.rounding_keys(0, epoch, shards, rows))
            times.append(time.perf_counter() - started)
        target: dict = found.ratios if key == "quantize" else found.details
        target[key + "_us_per_row"] = round(1e6 * statistics.median(times) / 256, 3)


def _step(quick: bool, args: argparse.Namespace, folder: str, found: Found) -> None:
    shards, rounds = args.shards or (20 if quick else 64), args.rounds or (3 if quick else 4)
    steps = args.steps or (40 if quick else 150)
    store = state_store.create(folder, [args.rows] * shards, "bench", parts.imagenet_fields(args.width or 1000))
    with store.session(store.begin_launch(), budget=15 * store.schema.shard_bytes) as session:
        parts.fill(session)
        before = parts.checksum(session)
        session.metrics.stall_seconds = 0.0
        for key, waiting in (("step_slowdown", False), ("step_slowdown_waiting", True)):
            times: tuple[list[float], list[float]] = [], []
            for turn in range(rounds):
                schedule = parts.staggered(shards, args.rows, open_shards=8, batch=256, seed=turn)[:steps]
                for kind in (0, 1) if turn % 2 else (1, 0):
                    times[kind].append(parts.timed_steps(session if kind else None, schedule, args.step_ms / 1e3,
                                                         waiting))
            found.ratios[key] = round(statistics.median(times[1]) / statistics.median(times[0]), 4)
        found.checks["changed_by_steps"] = int(parts.checksum(session) != before)
        found.details["stall_ms_per_step"] = round(1e3 * session.metrics.stall_seconds / (2 * rounds * steps), 3)


def _memory(quick: bool, args: argparse.Namespace, folder: str, found: Found) -> None:
    width, budget = args.width or (32 if quick else 1000), (24 if quick else 256) << 20
    small, large = (parts.peak_memory(f"{folder}/{n}", n, args.rows, width, budget) for n in args.samples)
    found.ratios["rss_growth"] = round(large["peak"] / small["peak"], 3)
    bound = [run["imports"] + budget + (300 << 20) for run in (small, large)]
    found.ratios["rss_within_bound"] = float(small["peak"] <= bound[0] and large["peak"] <= bound[1])
    found.details["rss_mb"] = {k: round(v / 1e6) for k, v in {"imports": large["imports"], "budget": budget,
                                                              "small": small["peak"], "large": large["peak"]}.items()}
    found.details["chunks_written"] = [small["chunks_written"], large["chunks_written"]]


def _snapshot(quick: bool, args: argparse.Namespace, folder: str, found: Found) -> None:
    shards = args.shards or 10_000
    started = time.perf_counter()
    fields = parts.imagenet_fields(args.width or 1000)[: 2 if quick else None]
    store = state_store.create(folder, [1] * shards, "bench", fields)
    found.details["create_seconds"] = round(time.perf_counter() - started, 3)
    dirty = range(0, shards, 100)
    totals, writes, opens = [], [], []
    with store.session(store.begin_launch(), budget=300 * store.schema.shard_bytes) as session:
        parts.touch(session, range(shards))
        session.snapshot("all")
        for turn in range(args.rounds or 3):
            parts.touch(session, dirty)
            session.finish()  # the write-back is over; what is left is fsync, manifest and log entry
            started = time.perf_counter()
            session.snapshot(f"dirty-{turn}")
            totals.append(time.perf_counter() - started)
            writes.append(parts.bare_sync(f"{folder}/bare-{turn}", len(dirty) * len(store.schema.fields)))
            started = time.perf_counter()
            manifest = state_store.open(folder).manifest(f"dirty-{turn}")
            opens.append(time.perf_counter() - started)
    found.ratios["snapshot_seconds"] = round(max(0.0, statistics.median(totals) - statistics.median(writes)), 3)
    found.details["snapshot_total_seconds"] = round(statistics.median(totals), 3)
    found.details["snapshot_bare_fsync_seconds"] = round(statistics.median(writes), 3)
    found.details["snapshot_chunks"] = sum(map(len, manifest.refs.values()))
    found.details["open_seconds"] = round(statistics.median(opens), 3)


def _peers(quick: bool, args: argparse.Namespace, folder: str, found: Found) -> None:
    shards, rounds, peers = args.shards or (10 if quick else 24), args.rounds or (3 if quick else 7), Peers()
    os.makedirs(folder)
    size = (args.width or (200 if quick else 1000), shards, args.rows)

    def build(name: str) -> beside.Contender:
        return beside.make(name, f"{folder}/{name}/store", *size)

    for name in ("lacuna", *beside.STORES):
        os.makedirs(f"{folder}/{name}")
    all_of_them = {"lacuna": build("lacuna"), **peers.build({
        name: (where, partial(build, name)) for name, (where, _) in beside.STORES.items()})}
    seconds: dict[str, list[float]] = {name: [] for name in all_of_them}
    for turn in range(rounds):
        schedule = parts.staggered(shards, args.rows, min(beside.OPEN_SHARDS, max(1, shards // 2)),
                                   min(beside.BATCH, args.rows), seed=turn)
        for name in list(all_of_them)[:: 1 if turn % 2 else -1]:
            started = time.perf_counter()
            all_of_them[name].epoch(schedule)
            all_of_them[name].snapshot(f"turn-{turn}")
            seconds[name].append(time.perf_counter() - started)
    last = f"turn-{rounds - 1}"
    sums = {name: beside.crc(each.read(last), shards) for name, each in all_of_them.items()}
    found.checks["different_stores"] = sum(value != sums["lacuna"] for value in sums.values())
    for each in all_of_them.values():
        each.close()
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    rivals = [name for name in medians if name not in ("lacuna", "memmap")]
    facts: dict[str, dict] = {}
    for name in all_of_them:
        place = f"{folder}/{name}/killed/store"
        os.makedirs(os.path.dirname(place))
        facts[name] = {"seconds": round(medians[name], 3), **beside.killed(name, place, *size)}
        facts[name]["disk_mb"] = round(beside.bytes_on_disk(place) / 1e6, 1)
        print(f"  {name}: {facts[name]}", flush=True)

    def ratio(other: str) -> float:
        return round(statistics.median(b / a for a, b in zip(seconds["lacuna"], seconds[other], strict=True)), 3)

    best = min(rivals, key=lambda name: medians[name])
    found.ratios["vs_best_peer"], found.ratios["vs_memmap"] = ratio(best), ratio("memmap")
    found.details.update({"peers": facts, "best_peer": best, **peers.facts()})


PARTS = {"epoch": _epoch, "batch": _batch, "quantize": _quantize, "step": _step, "memory": _memory,
         "snapshot": _snapshot, "peers": _peers}
