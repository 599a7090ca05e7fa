"""One self-contained HTML file about one or several runs: no server, no network, light and dark.

  lacuna report runs/my-run                                            writes runs/my-run/report.html
  lacuna report runs/an runs/en runs/role --oracle runs/full --out report.html      a comparison with gap closed
  lacuna report s3://bucket/runs/my-run --out report.html              a run on object storage
  lacuna report runs/an --score --samples 2000                         run the kept checkpoints over training samples
  lacuna report runs/my-run-tune                                       a search of `lacuna tune`, and its best trials
First the headline: what was trained, its mAP, how much of the gap it closes, three pictures, the classes that gained
and lost most. Then curves, per-class AP, what the model believes about labels that were not observed, heatmaps over the
epochs, the difference of the configs, and last what the machine did. Figures over training use kept snapshots: a larger
train.keep keeps more of them.
What a run cannot show is listed at the end of the page with the reason.
"""

from __future__ import annotations

import argparse
import json
from functools import partial

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.basics.progress import progress
from lacuna.tools.passes.parts import absolute
from lacuna.tools.report.beliefs import beliefs_of
from lacuna.tools.report.comparing import class_table, config_differences, gap_closed
from lacuna.tools.report.headline import headline
from lacuna.tools.report.page import render
from lacuna.tools.report.recorded_run import Lacks, RecordedRun
from lacuna.tools.report.searches import best_runs, read_search, search_data
from lacuna.tools.report.strips import strips_of
from lacuna.tools.run_files import output_folder, while_written
from lacuna.trainer.methods import score_of


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folders or URLs, or folders of "
                        "`lacuna tune`; differences are to the first")
    parser.add_argument("--out", help="HTML file (default: report.html in the first run's folder, or in a folder here "
                        "if that run is on object storage)")
    parser.add_argument("--oracle", metavar="RUN", help="run with full labels, for the table of how much gap is closed")
    parser.add_argument("--samples", type=int, default=5000, help="training samples to look at (default 5000)")
    parser.add_argument("--score", action="store_true", help="score those samples with every kept checkpoint (slow on "
                        "large models); by default only what the state store remembers is used")
    parser.add_argument("--full-labels", default="labels", metavar="SIDECAR",
                        help="sidecar with the true labels of the training set, if it exists (default: labels)")
    parser.add_argument("--images", type=int, default=6, help="training images with heatmaps (default 6)")
    parser.add_argument("--json", action="store_true", help="print the page's data as JSON instead of writing it")


def run(args: argparse.Namespace) -> None:
    print(write(args))


def write(args: argparse.Namespace) -> str:
    """The page's URL, or with --json its data."""
    if args.samples < 1:
        raise UserError(f"--samples {args.samples}: at least 1 is needed.")
    searches = {path: found for path in args.runs if (found := read_search(path)) is not None}
    paths = [run for path in args.runs for run in (best_runs(path, searches[path]) if path in searches else [path])]
    folders = [RecordedRun.open(path) for path in paths]
    oracle = RecordedRun.open(args.oracle) if args.oracle else None
    if oracle and oracle.path not in [folder.path for folder in folders]:
        folders.append(oracle)
    data = {**page_data(folders, oracle, args), "searches": [search_data(*search) for search in searches.items()]}
    if args.json:
        return json.dumps(data, ensure_ascii=False)
    out = args.out or storage.join(output_folder(absolute(args.runs[0])), "report.html")
    storage.write_atomic(out, render(data).encode())
    return out


def _run_data(path: str, args: argparse.Namespace) -> tuple[dict, list[dict[str, str]]]:
    """What the page says about a run, and what is absent."""
    folder, absent = RecordedRun.open(path), list[dict[str, str]]()

    def lacks(what: str, why: str) -> None:
        absent.append({"run": folder.name, "what": what, "why": why})

    _say_if_scores_only_rank(folder, lacks)
    return {**folder.facts(lacks),
            "beliefs": beliefs_of(folder, args.full_labels, args.samples, args.score, lacks),
            "strips": strips_of(folder, args.full_labels, args.images, lacks)}, absent


def page_data(folders: list[RecordedRun], oracle: RecordedRun | None, args: argparse.Namespace) -> dict:
    absent: list[dict[str, str]] = []
    runs = []
    for folder in progress(folders, len(folders), "reading runs", "runs"):
        facts, missing = while_written(folder.path, partial(_run_data, folder.path, args))
        runs.append(facts)
        absent += missing
    if oracle is None:
        absent.append({"run": "", "what": "gap closed", "why": "no run with full labels was given: pass --oracle RUN."})
    data = {"runs": runs, "absent": absent, "classes": class_table(folders), "config": config_differences(folders),
            "gap": gap_closed(folders, oracle) if oracle else None}
    return {"headline": headline(folders, oracle, data), **data}


def _say_if_scores_only_rank(folder: RecordedRun, lacks: Lacks) -> None:
    score = score_of(folder.config.method)
    if not score.per_class:
        lacks("probabilities of single classes", f"the scores of method {folder.config.method['name']!r} are "
              f"{score.formula}: each depends on the image's other classes. They rank images, and thresholds chosen on "
              "validation images hold, but a score is not the probability that its class is in the image.")
