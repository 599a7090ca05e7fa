"""Which labels to ask a person for next: image × class questions, or whole images, as many as the budget allows.

  lacuna select runs/my-run --budget 500 --out questions.csv                then answer them: lacuna explore runs/my-run
  lacuna select runs/my-run --budget 500 --by uncertain --out questions.parquet
  lacuna select runs/my-run --questions images --budget 50 --out q.csv       images whose classes are all asked about
  lacuna select runs/my-run --groups video --budget 500 --out q.csv          at most one frame of a video
  lacuna select runs/my-run --by lot --budget 4000 --top 500 --out q.csv     a draw by lot, on which promises can rest
  lacuna select demo/runs/demo-an --budget 400 --rounds 3 --answers labels   the whole loop, answered by true labels
Ways to choose (--by):
  gain       what an answer is worth: how likely it finds a missing positive, how new the image is (by the model's
             features; near-duplicates are left out), and how much the class lacks positives
  diverse    as unlike each other as can be, by the model's features (k-centre), and for the classes that lack positives
  uncertain  where the model has no idea (belief nearest to 0.5)
  random     any unknown entry
  lot        equally many of every class, drawn among its --top highest beliefs: once all of a class are answered,
             `lacuna suggest` promises a precision for it without a validation set
With --questions images the budget counts images: those whose open entries are worth most together, all of them asked,
the likeliest first (in `lacuna explore` the key N rejects what is left of an image). With --groups (made by `lacuna
annotate --scheme groups`) a batch has at most --per-group samples of a group.
Questions go to --out as a table (key, shard, row, class, name, score, value) and to RUN/explore/, where `lacuna
explore` shows them under "questions". Decided entries are not asked again. With --rounds, each round asks, takes the
answers from the sidecar --answers, writes a sidecar RUN-gain-round1 (RUN-gain-images-round1), … and trains a run of
that name with it.
"""

from __future__ import annotations

import argparse
import json
import os

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.groups import Groups
from lacuna.data_pipelines.labels import NEGATIVE
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.passes.datasets import training_set
from lacuna.tools.passes.looking import LookJob
from lacuna.tools.passes.pool import add_pool_arguments, open_pool, pool_settings
from lacuna.tools.passes.scoring import shard_rows
from lacuna.tools.passes.trained import Trained, held
from lacuna.tools.run_files import output_folder
from lacuna.tools.select.choosing import WAYS, Wish, choose
from lacuna.tools.select.images import choose_images
from lacuna.tools.select.loop import IMAGES, run_rounds
from lacuna.tools.select.questions import Questions, save
from lacuna.tools.select.quota import Quota
from lacuna.tools.suggest.evidence import Decided, Scored, decisions_of
from lacuna.tools.suggest.table import check_format


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN|CHECKPOINT", help="run folder (its best checkpoint), or a checkpoint")
    parser.add_argument("--budget", type=int, default=500, metavar="N", help="questions to ask (default 500); with "
                        "--questions images: images")
    parser.add_argument("--questions", choices=("entries", IMAGES), default="entries", help="an image and a class each "
                        "(default), or whole images")
    parser.add_argument("--by", choices=WAYS, default="gain", help="default: gain")
    parser.add_argument("--out", metavar="FILE", help="table to write: .csv or .parquet (default: only RUN/explore/)")
    parser.add_argument("--labels", metavar="NAME", help="sidecar of the training set (default: the run's)")
    parser.add_argument("--groups", metavar="NAME", help="groups of the training set (lacuna annotate --scheme groups)")
    parser.add_argument("--per-group", type=int, default=1, metavar="N", help="--groups: samples of a group at most "
                        "(default 1)")
    parser.add_argument("--per-image", type=int, default=100, metavar="N", help="--questions images: classes of an "
                        "image at most, the likeliest (default 100)")
    parser.add_argument("--top", type=int, default=500, help="lot: of a class, the highest beliefs (default 500)")
    parser.add_argument("--seed", type=int, default=0, help="of random draws (default 0)")
    parser.add_argument("--rounds", type=int, metavar="N", help="ask, answer and train again, so many times")
    parser.add_argument("--answers", metavar="NAME", help="with --rounds: sidecar with the true labels")
    parser.add_argument("--ranks", type=int, default=1, help="with --rounds: ranks that train (default 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    add_pool_arguments(parser)


def run(args: argparse.Namespace) -> None:
    _check(args)
    if args.rounds:
        rounds = run_rounds(args, ask)
        print(json.dumps({"rounds": rounds}) if args.json else _rounds_text(rounds))
        return
    with held(args.model, pool_settings(args).folder) as trained:
        source = open_source(trained, args.labels)
        questions = ask(trained, source, decisions_of(trained.run, source.sidecar)[0], args)
    home = os.path.join(output_folder(trained.run), "explore")
    facts = {"by": args.by, "of": args.questions, "questions_asked": len(questions),
             "classes": len(np.unique(questions.classes)), "labels": source.sidecar.name,
             "images": len({entry[:2] for entry in questions.entries()}),
             "expected_positives": round(float(questions.scores.sum()), 1)}
    save(questions, source.index, args.out, home, source.sidecar.name, facts)
    print(json.dumps({**facts, "out": args.out}) if args.json else
          f"{args.out or home}: {facts['questions_asked']:,} questions about {facts['images']:,} images, in "
          f"{facts['classes']} classes. Answer them with `lacuna explore {args.model}`, view questions")


def _check(args: argparse.Namespace) -> None:
    if args.out:
        check_format(args.out, "--out")
    for option in ("budget", "top", "ranks", "rounds", "per_group", "per_image"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UserError(f"--{option.replace('_', '-')} {value}: at least 1 is needed.")
    if args.by == "lot" and (args.questions == IMAGES or args.groups):
        raise UserError("--by lot: a promise rests on a plain draw of entries, so it goes with neither --questions "
                        "images nor --groups. Leave them out, or choose another --by.")
    if (args.rounds is None) != (args.answers is None):
        raise UserError("--rounds and --answers belong together: the answers come from a sidecar with the true labels, "
                        "such as --answers labels.")


def open_source(trained: Trained, labels: str | None) -> ShardSource:
    source = training_set(trained, labels=labels)
    if source.sidecar.unlisted == NEGATIVE:
        raise UserError(f"{source.index.url}: its sidecar {source.sidecar.name!r} knows every entry: there is nothing "
                        "to ask. Choose a partial one with --labels.")
    return source


def ask(trained: Trained, source: ShardSource, decided: Decided, args: argparse.Namespace) -> Questions:
    settings = pool_settings(args)
    rows = shard_rows(source)
    quota = Quota(Groups.load(source.index, args.groups) if args.groups else None, args.per_group)
    with open_pool(settings) as pool:
        parts = pool.run(LookJob(trained, source), rows, settings.folder(trained.run), "looking")
    scored = Scored(parts, source, decided)
    positives = source.sidecar.positives if source.subset is None else source.subset_counts()[0]
    accepted = np.array([cls for (_, _, cls), right in decided.items() if right], np.int64)
    positives = positives + np.bincount(accepted, minlength=source.classes)
    if args.by == "lot" and args.budget < source.classes:
        raise UserError(f"--budget {args.budget}: a lot asks equally many of each of the {source.classes} classes; "
                        f"give at least {source.classes}.")
    wish = Wish(args.by, args.budget, positives, args.seed, args.top, args.per_image)
    questions = (choose_images if args.questions == IMAGES else choose)(scored, wish, quota)
    if not settings.parts:
        parts.remove(list(rows))
    return questions


def _rounds_text(rounds: list[dict]) -> str:
    lines = [f"{'round':<6} {'answered':>9} {'yes':>7} {'val mAP':>8} {'test mAP':>9}"]
    for entry in rounds:
        maps = [f"{entry[name]:8.2f}" if entry[name] is not None else "       –" for name in ("val_map", "test_map")]
        lines.append(f"{entry['round']:<6} {entry['answered']:>9,} {entry['yes']:>7,} {maps[0]} {maps[1]:>9}")
    return "\n".join(lines)
