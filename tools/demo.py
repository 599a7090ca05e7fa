"""Makes scenes of 1-4 handwritten digits (real ones, from scikit-learn), hides all labels but one of every image,
trains on 2 DeepSpeed ranks, and compares with what full labels would give.

  lacuna demo --out demo            about 2 minutes on 2 cores
  lacuna demo --out demo --ranks 1
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys

from lacuna.basics.deaths import describe_exit
from lacuna.basics.errors import UserError
from lacuna.basics.places import CONFIGS
from lacuna.basics.progress import Progress
from lacuna.data_pipelines.annotation.annotate import SCHEMES, annotate
from lacuna.data_pipelines.annotation.labelled_rows import LabelledRows
from lacuna.data_pipelines.index import ShardIndex, Sidecar, sidecar_names
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import digits
from lacuna.tools.heatmaps import draw_heatmaps
from lacuna.tools.launches import command, environment
from lacuna.trainer.config.files import load_config

SPLITS = {"train": 4000, "val": 500, "test": 1000}
RUN = "demo-gr"  # the one that the demo is about


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="demo", help="folder for the data and the runs (default: demo)")
    parser.add_argument("--ranks", type=int, default=2, help="DeepSpeed ranks (default 2)")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object in the last line")


def run(args: argparse.Namespace) -> None:
    out = os.path.abspath(args.out)
    make_data(os.path.join(out, "data"))
    methods = {
        "one label, assume negative (AN)": ("demo-an", ["method={name: an}"]),
        "one label, robust loss (GR)": (RUN, []),
        "all labels (the ceiling)": ("demo-full", ["method={name: bce}", "data.train.labels=labels"]),
    }
    rows = []
    for title, (name, overrides) in methods.items():
        print(f"\n== {title}", flush=True)
        results = train(out, name, args.ranks, overrides)
        rows.append((title, results["val"]["map"], results["test"]["map"]))
    print(f"\n{'labels and method':<36} {'val mAP':>8} {'test mAP':>9}")
    for title, val, test in rows:
        print(f"{title:<36} {val:8.2f} {test:9.2f}")
    draw_sheet(out)
    page = make_page(out)
    print("\n".join(["", *gap_bars({title: test for title, _, test in rows}), "", *next_steps(out, page)]))
    if args.json:
        print(json.dumps([{"run": title, "val_map": val, "test_map": test} for title, val, test in rows]))


def gap_bars(scores: dict[str, float], width: int = 40) -> list[str]:
    """How far each run comes from the first one's score to the last one's, drawn in letters."""
    low, high = next(iter(scores.values())), list(scores.values())[-1]
    lines = ["how much of the gap between one label and all labels is closed:"]
    for title, score in scores.items():
        share = (score - low) / (high - low) if high > low else 0.0
        full = round(min(max(share, 0.0), 1.0) * width)
        lines.append(f"{title:<36} {'█' * full}{'░' * (width - full)} {share:4.0%}")
    return lines


def next_steps(out: str, page: str) -> list[str]:
    """Commands that can be pasted; `lacuna` by its path where the environment is not active."""
    own = os.path.join(os.path.dirname(sys.executable), "lacuna")
    words = "lacuna" if shutil.which("lacuna") == own else own
    return [f"open the report:         {sys.executable} -m webbrowser -t {page}",
            f"browse what it believes: {words} explore {os.path.join(out, 'runs', RUN)}",
            "the same with your own photos: the README's five lines"]


def draw_sheet(out: str) -> None:
    """Where the model sees digits in the first training scenes, which have one label and more digits."""
    folder, sheet = os.path.join(out, "runs", RUN), os.path.join(out, "heatmaps.png")
    draw_heatmaps(load_config(os.path.join(folder, "config.yaml"), []), folder, sheet, 0, list(range(10)), 4)
    print(f"\nWhere the model sees which digit, in ten training scenes that came with one label each: {sheet}")


def make_page(out: str) -> str:
    """The report that compares the three runs."""
    from lacuna.tools import report

    parser, page = argparse.ArgumentParser(), os.path.join(out, "report.html")
    report.configure(parser)
    runs = [os.path.join(out, "runs", name) for name in ("demo-an", RUN, "demo-full")]
    report.write(parser.parse_args([*runs[:2], "--oracle", runs[2], "--out", page]))
    return page


def make_data(folder: str) -> None:
    """Shards of every split, and the training split's single-positive sidecar; what exists is kept."""
    for split, count in SPLITS.items():
        url = os.path.join(folder, split)
        if not os.path.exists(os.path.join(url, "index.json")):
            with Progress(count, f"drawing {split} scenes", "scenes") as meter:
                pack(digits.read(count, split), url, Layout(), advance=meter.advance)
    index = ShardIndex.load(os.path.join(folder, "train"))
    if "single" not in sidecar_names(index):
        rows = LabelledRows(index, Sidecar.load(index, "labels"))
        annotate(rows, "single", "single_positive", SCHEMES["single_positive"]())


def train(out: str, name: str, ranks: int, overrides: list[str]) -> dict:
    """One launch; its results. A finished run of an earlier demo is not repeated."""
    folder = os.path.join(out, "runs", name)
    overrides = [f"name={name}", f"run_folder={os.path.join(out, 'runs')}",
                 *[f"data.{split}.url={os.path.join(out, 'data', split)}" for split in SPLITS], *overrides]
    words = command(ranks, "--config", os.path.join(CONFIGS, "demo.yaml"), *overrides)
    done = subprocess.run(words, env=environment())
    if done.returncode:
        raise UserError(f"the run {name} {describe_exit(done.returncode)}; see above and {folder}/log.txt.")
    with open(os.path.join(folder, "results.json"), encoding="utf-8") as f:
        return json.load(f)
