"""Labels, decisions and suggestions to and from the tools that annotators use.

  lacuna exchange write label_studio shards/train --labels single --suggestions s.csv --images --out tasks
  lacuna exchange write label_studio shards/train --labels single --suggestions questions.csv --only-suggested --out ask
  lacuna exchange write coco shards/train --decisions runs/my-run --out coco      with what was decided in explore
  lacuna exchange write hugging_face shards/train --beliefs runs/my-run --at-least 0.7 --out hf
  lacuna exchange read label_studio tasks --shards shards/train --sidecar reviewed --base single
  lacuna exchange read coco coco --shards shards/train --sidecar from-coco --decisions runs/my-run
Formats: coco (annotations.json, LVIS's neg_category_ids, results.json), label_studio (tasks.json, setup.xml), fiftyone
(its dataset folder), voc (ImageSets/Main, results/Main), hugging_face (Parquet that load_dataset opens), csv.
What was written and is read again is the same: positives, negatives, suggestions and scores, and what is unknown.
Reading makes a sidecar: alone, or over the one that --base names; suggestions go to --suggestions, and with --decisions
what people changed counts as decided, for `lacuna suggest` and `lacuna explore`.
"""

from __future__ import annotations

import argparse
import json
from types import ModuleType

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import UNLISTED_WORDS, ShardIndex
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.exchange import coco, fiftyone, hugging_face, label_studio, tables, voc
from lacuna.tools.exchange.bundle import IMAGES, Bundle, bundle_of, copy_images, read_about, write_about
from lacuna.tools.exchange.taking import beliefs_of, decided_of, read_suggestions, suggested_keys, take

FORMATS: dict[str, ModuleType] = {"coco": coco, "csv": tables, "fiftyone": fiftyone, "hugging_face": hugging_face,
                                  "label_studio": label_studio, "voc": voc}


def configure(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="write|read")
    write = verbs.add_parser("write", help="shards and labels to another tool's files")
    write.add_argument("format", choices=sorted(FORMATS), help="of the files to write")
    write.add_argument("shards", help="folder or URL that holds index.json")
    write.add_argument("--out", required=True, metavar="DIR", help="folder for the files")
    write.add_argument("--labels", default="labels", metavar="NAME", help="sidecar (default: labels)")
    write.add_argument("--suggestions", metavar="FILE", help="table of `lacuna suggest` or `lacuna select`")
    write.add_argument("--only-suggested", action="store_true", help="only the samples that --suggestions or --beliefs "
                       "name, in that order: tasks for people")
    write.add_argument("--beliefs", metavar="RUN", help="suggest what the newest state of a run believes")
    write.add_argument("--at-least", type=float, default=0.5, help="--beliefs: the lowest one to suggest (default 0.5)")
    write.add_argument("--decisions", metavar="RUN", help="lay over the labels what `lacuna explore RUN` decided")
    write.add_argument("--images", action="store_true", help="copy the images, too")
    write.add_argument("--image-url", default=label_studio.PREFIX, metavar="PREFIX", help="label_studio: what stands "
                       f"before images/… (default: {label_studio.PREFIX.replace('%', '%%')})")
    read = verbs.add_parser("read", help="another tool's files to a sidecar")
    read.add_argument("format", choices=sorted(FORMATS), help="of the files to read")
    read.add_argument("folder", help="folder or URL of the files")
    read.add_argument("--shards", required=True, help="folder or URL that holds index.json")
    read.add_argument("--sidecar", required=True, metavar="NAME", help="sidecar to make")
    read.add_argument("--base", metavar="NAME", help="sidecar over which the labels are laid (default: none)")
    read.add_argument("--unlisted", choices=sorted(UNLISTED_WORDS), help="what an entry without a mark is (default: as "
                      "it was written, or unknown)")
    read.add_argument("--suggestions", metavar="FILE", help="write the suggestions as a table: .csv or .parquet")
    read.add_argument("--decisions", metavar="RUN", help="record what differs from --base as decisions of `lacuna "
                      "explore RUN`")
    for verb in (write, read):
        verb.add_argument("--json", action="store_true", help="print the facts as one JSON object")


def run(args: argparse.Namespace) -> None:
    facts = _write(args) if args.verb == "write" else _read(args)
    print(json.dumps(facts) if args.json else ", ".join(f"{name} {value}" for name, value in facts.items()))


def _write(args: argparse.Namespace) -> dict:
    source = ShardSource.load(args.shards, args.labels, None)
    suggested = read_suggestions(args.suggestions, source) if args.suggestions else {}
    if args.beliefs:
        suggested |= beliefs_of(args.beliefs, source, args.at_least)
    if args.only_suggested and not suggested:
        raise UserError("--only-suggested: nothing is suggested. Name a table with --suggestions, or a run with "
                        "--beliefs and a lower --at-least.")
    if args.images and source.index.kind != "image":
        raise UserError("--images: the shards hold feature vectors. Leave it out.")
    bundle = bundle_of(source, decided_of(args.decisions, source) if args.decisions else {}, suggested)
    if args.only_suggested:
        bundle = bundle.only(suggested_keys(suggested, source))
    write_format(args.format, bundle, args.out, source if args.images else None, args.image_url)
    return {"out": args.out, **_counts(bundle)}


def write_format(form: str, bundle: Bundle, out: str, pictures: ShardSource | None, prefix: str) -> None:
    """`pictures`: where images to copy are, or None."""
    if form == "hugging_face":
        hugging_face.write(bundle, out, pictures)
    elif form == "label_studio":
        label_studio.write(bundle, out, prefix)
    else:
        FORMATS[form].write(bundle, out)
    write_about(bundle, out, form)
    if pictures is not None and form != "hugging_face":
        copy_images(bundle, out, pictures, {"fiftyone": fiftyone.DATA, "voc": "JPEGImages"}.get(form, IMAGES))


def read_format(form: str, folder: str) -> Bundle:
    bundle = FORMATS[form].read(folder)
    about = read_about(folder)
    bundle.unlisted = about.get("unlisted", "unknown")
    if bundle.unlisted not in UNLISTED_WORDS:
        raise UserError(f"{folder}: unlisted is {bundle.unlisted!r}, legal: {', '.join(UNLISTED_WORDS)}.")
    return bundle


def _read(args: argparse.Namespace) -> dict:
    bundle = read_format(args.format, args.folder)
    if args.unlisted:
        bundle.unlisted = args.unlisted
    taken = take(bundle, ShardIndex.load(args.shards), args.sidecar, args.base, args.folder)
    if args.suggestions:
        taken.save_suggestions(args.suggestions)
    decided = taken.record(args.decisions, args.format) if args.decisions else 0
    return {"sidecar": args.sidecar, **_counts(bundle), "not_in_the_shards": taken.strangers, "decided": decided}


def _counts(bundle: Bundle) -> dict:
    marks = list(bundle.samples.values())
    return {"samples": len(marks), "positives": sum(len(m.positives) for m in marks),
            "negatives": sum(len(m.negatives) for m in marks), "suggestions": sum(len(m.suggested) for m in marks)}
