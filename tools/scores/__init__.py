"""A table of scores (samples × classes) by any model: for vlpl, gpr, aevlp, ccd, `suggest`, `explore` and `relation`.

  lacuna scores open_clip:ViT-L-14-336 --weights openai --shards shards/coco14/train --out shards/coco14/clip
  lacuna scores open_clip:local-dir:models/clip --crops grid:4 --shards shards/coco14/train --out t     AEVLP's tables
  lacuna scores timm:tf_efficientnet_lite0 --weights lite0.safetensors --shards shards/coco14/train \\
      --suggest-mapping coco.tsv --wordnet /usr/share/wordnet     # look it over, then:
  lacuna scores timm:tf_efficientnet_lite0 --weights lite0.safetensors --mapping coco.tsv \\
      --shards shards/coco14/train --out shards/coco14/imagenet   # or --mapping imagenet_coco, which ships
  lacuna scores runs/coco-an --shards shards/coco14/train --out shards/coco14/an            one of our runs
MODEL is open_clip:NAME (also open_clip:hf-hub:REPO and open_clip:local-dir:FOLDER), timm:NAME, torchvision:NAME, or a
run. Weights are a file, a tag that is fetched (needs a connection), or `default`. Then: method.scores=OUT. The
embeddings of class names are left beside the table, in OUT.text.npz, for `lacuna relation text` and model.head_init; of
a classifier, its own weights for our classes, in OUT.vectors.npz, for model.head_init of runs on the same network.
Every shard is one part: a rerun goes on where the last one stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from dataclasses import replace

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import ShardIndex, sidecar_names
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.wordnet import WordNet
from lacuna.tools.passes.datasets import open_dataset
from lacuna.tools.passes.pool import Job, add_pool_arguments, open_pool, pool_settings
from lacuna.tools.passes.scoring import ScoreJob, bad_of, shard_rows
from lacuna.tools.passes.trained import held
from lacuna.tools.scores.classifiers import ClassifierModel
from lacuna.tools.scores.clip import ClipModel
from lacuna.tools.scores.job import OutsideJob, OwnModel, write_tables
from lacuna.tools.scores.looking import parse_crops
from lacuna.tools.scores.mapping import Mapping, Outputs, by_ids, read_mapping, suggest
from lacuna.tools.scores.prompts import PROMPTS, read_names, read_prompts
from lacuna.trainer.class_vectors import write_class_vectors
from lacuna.trainer.evaluate import judge_bad
from lacuna.trainer.models.weights import is_file

_MOST_BAD = 0.001  # of the samples, as in training


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="open_clip:NAME, timm:NAME, torchvision:NAME, or a run folder")
    parser.add_argument("--shards", required=True, metavar="URL", help="dataset folder with index.json")
    parser.add_argument("--subset", metavar="NAME", help="only these rows; others are 0 (default: all)")
    parser.add_argument("--out", metavar="URL", help="the new table")
    parser.add_argument("--weights", default="default", help="a file, or a tag or name that is fetched (default: "
                        "`default`); open_clip: one of open_clip.list_pretrained()")
    parser.add_argument("--dtype", choices=["float16", "float32"], default="float16", help="as stored")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    look = parser.add_argument_group("how it looks")
    look.add_argument("--fit", choices=["squash", "center"], default="squash", help="the whole image, or the square in "
                      "its middle (default: squash)")
    look.add_argument("--crops", metavar="KIND:N", help="also crops, as the tables crop_max and crop_min: grid:G for "
                      "G × G, or random:N")
    look.add_argument("--seed", type=int, default=0, help="of random crops (default 0)")
    look.add_argument("--image-size", type=int, default=0, metavar="S", help="of timm and torchvision models (default: "
                      "what they were trained with)")
    look.add_argument("--activation", choices=["softmax", "sigmoid"], help="default: as open_clip models were trained, "
                      "softmax for classifiers")
    look.add_argument("--temperature", type=float, metavar="T", help="divides logits (default: the learnt one of "
                      "open_clip models, 1 for classifiers)")
    words = parser.add_argument_group("open_clip")
    words.add_argument("--prompts", default="photo", metavar="SET|FILE", help=f"{', '.join(PROMPTS)}, or a file with "
                       "one template with {} on each line (default: photo)")
    words.add_argument("--names", metavar="FILE", help="lines `class<TAB>name` where prompts need other words")
    theirs = parser.add_argument_group("classifiers with classes of their own")
    theirs.add_argument("--mapping", metavar="FILE", help="lines `our class<TAB>theirs; …` (WordNet ids, names or #N), "
                        "or imagenet_coco, imagenet_voc or imagenet_openimages, which ship (default: by the dataset's "
                        "WordNet ids)")
    theirs.add_argument("--suggest-mapping", metavar="FILE", help="write a proposal by names and WordNet, and stop")
    theirs.add_argument("--wordnet", metavar="DIR", help="folder with data.noun and index.noun of WordNet 3.0: an id "
                        "then means its kinds too")
    theirs.add_argument("--model-classes", metavar="FILE", help="one line per output, `wnid<TAB>names` or names "
                        "(default: ImageNet's)")
    add_pool_arguments(parser)


def run(args: argparse.Namespace) -> None:
    kind, _, name = args.model.partition(":")
    if args.temperature is not None and not args.temperature > 0:
        raise UserError(f"--temperature {args.temperature}: a number above 0 is needed.")
    args.views = parse_crops(args.crops, args.fit, args.seed)
    if args.suggest_mapping:
        _suggest(args, kind, name)
    elif not args.out:
        raise UserError("--out URL is needed: where the table goes.")
    elif kind == "open_clip" and name:
        _with_clip(args, name)
    elif kind in ("timm", "torchvision") and name:
        _with_classifier(args, kind, name)
    else:
        _with_run(args)


def _with_clip(args: argparse.Namespace, name: str) -> None:
    source = _images(args)
    weights = args.weights
    if weights == "default" and ":" not in name:
        raise UserError(f"--weights: name a file or a tag for open_clip:{name}, for example openai.")
    names = tuple(read_names(args.names, source.index.classes))
    model = ClipModel(name, weights, _digest(name, weights), args.activation, args.temperature,
                      read_prompts(args.prompts), names).prepared()
    text = args.out.rstrip("/") + ".text.npz"
    write_class_vectors(text, model.text, source.index.classes, json.dumps(model.facts))
    _score(args, OutsideJob(model, source, args.views), source, model.facts,
           {"text": text})


def _with_classifier(args: argparse.Namespace, kind: str, name: str) -> None:
    source = _images(args)
    model = _classifier(args, kind, name)
    outputs = _outputs(args, model)
    mapping: Mapping = read_mapping(args.mapping, source.index, outputs) if args.mapping else by_ids(
        source.index, outputs)
    lacking = [cls for cls, own in zip(source.index.classes, mapping, strict=True) if not own]
    mapped = replace(model, mapping=mapping)
    job = OutsideJob(mapped, source, args.views)
    vectors, own_rows = args.out.rstrip("/") + ".vectors.npz", mapped.class_vectors()
    if own_rows is not None:
        write_class_vectors(vectors, own_rows, source.index.classes, json.dumps(mapped.facts))
    _score(args, job, source, mapped.facts, {"without_counterpart": lacking,
                                                "vectors": None if own_rows is None else vectors})


def _with_run(args: argparse.Namespace) -> None:
    settings = pool_settings(args)
    views = args.views
    with held(args.model, settings.folder) as trained:
        index = ShardIndex.load(args.shards)
        source = open_dataset(trained, args.shards, _any_sidecar(index), args.subset)
        job: Job = ScoreJob(trained, source) if len(views.tables) == 1 else OutsideJob(
            OwnModel(trained, source), source, views)
        _score(args, job, source, {"run": trained.checkpoint, "weights": trained.digest}, {})


def _score(args: argparse.Namespace, job: Job, source: ShardSource, facts: dict, more: dict) -> None:
    """The pass, and the table of its parts."""
    settings, wanted = pool_settings(args), args.views.tables
    rows, folder = shard_rows(source), settings.folder(args.out.rstrip("/") + ".parts")
    with open_pool(settings) as pool:
        parts = pool.run(job, rows, folder, f"scores of {source.index.url}")
    bad = [sample for _, part in parts.read_all(list(rows)) for sample in bad_of(part)]
    judge_bad(bad, sum(rows.values()), _MOST_BAD, source.index.url)
    write_tables(args.out, source.index, parts, list(rows), wanted, args.dtype, {"model": json.dumps(facts)})
    if not settings.parts:
        parts.remove(list(rows))
    report = {"store": args.out, "tables": list(wanted), "samples": sum(rows.values()), "unreadable": len(bad),
              "classes": source.classes, **more}
    if args.json:
        print(json.dumps(report))
        return
    print(f"{args.out}: {', '.join(wanted)} for {report['samples']:,} samples × {source.classes:,} classes")
    if "text" in more:
        print(f"{more['text']}: embeddings of the class names")
    lacking = more.get("without_counterpart", [])
    if lacking:
        print(f"{len(lacking)} classes have no counterpart in the model and score 0: {', '.join(lacking)}")


def _suggest(args: argparse.Namespace, kind: str, name: str) -> None:
    if kind not in ("timm", "torchvision"):
        raise UserError(f"--suggest-mapping is for timm:NAME and torchvision:NAME, not for {args.model}.")
    index = ShardIndex.load(args.shards)
    text, lacking = suggest(index, _outputs(args, _classifier(args, kind, name)))
    storage.write_atomic(args.suggest_mapping, text.encode())
    report = {"mapping": args.suggest_mapping, "classes": len(index.classes), "without_counterpart": lacking}
    print(json.dumps(report) if args.json else
          f"{args.suggest_mapping}: {len(index.classes) - len(lacking)} of {len(index.classes)} classes have a "
          f"counterpart; none: {', '.join(lacking) or 'all have one'}. Look it over, then pass it as --mapping.")


def _classifier(args: argparse.Namespace, kind: str, name: str) -> ClassifierModel:
    return ClassifierModel(kind, name, args.weights, _digest(name, args.weights), args.image_size,
                           args.activation or "softmax", args.temperature or 1.0)


def _outputs(args: argparse.Namespace, model: ClassifierModel) -> Outputs:
    wordnet = WordNet.load(args.wordnet) if args.wordnet else None
    return Outputs(model.classes(args.model_classes), wordnet)


def _images(args: argparse.Namespace) -> ShardSource:
    index = ShardIndex.load(args.shards)
    if index.kind != "image":
        raise UserError(f"--shards {args.shards} holds feature vectors; {args.model} looks at images.")
    source = ShardSource.load(args.shards, _any_sidecar(index), args.subset)
    if not np.any(source.counts):
        raise UserError(f"{args.shards}: no samples take part. Check it{' and --subset' if args.subset else ''}.")
    return source


def _any_sidecar(index: ShardIndex) -> str:
    """Labels play no part, but a dataset is opened with some."""
    names = sidecar_names(index)
    return "labels" if "labels" in names or not names else names[0]


def _digest(name: str, weights: str) -> str:
    """Of a file's content, or of a folder's: another file of the same name is another model."""
    folder = storage.local_path(name.removeprefix("local-dir:")) if name.startswith("local-dir:") else ""
    paths = [os.path.join(folder, part) for part in sorted(os.listdir(folder))] if os.path.isdir(folder) else (
        [weights] if is_file(weights) else [])
    found = hashlib.sha256()
    for path in filter(os.path.isfile, paths):
        with open(path, "rb") as data:
            found.update(hashlib.file_digest(data, "sha256").digest())
    return found.hexdigest() if paths else ""
