"""What Soft Exposure needs to know before it trains: every sample's nearest neighbours, and distances between classes.

  lacuna neighbors --shards shards/features --labels pos10 --out near/pos10                  feature shards as they are
  lacuna neighbors runs/pretrained --shards shards/coco17/train --labels pos10 --out near/pos10
  lacuna neighbors --backbone torchvision:resnet101 --weights default --shards … --labels pos10 --out near/pos10
  lacuna neighbors --features near/pos10/features --shards … --labels pos30 --out near/pos30    features made before
Then train with method.name=se method.neighbors=near/pos10 (or se_l, se_i) on the same shards, labels and subset.
For images the features of a run's model, or of a pretrained backbone, are written to OUT/features as feature shards.
Neighbours are never the sample itself. Class medians are taken over annotated positives. OUT also holds neighbors.json
(fingerprints, checked when training starts), class_distances.npy and a state store with the neighbours of each sample
(`lacuna inspect OUT/state --index SHARDS --sample KEY`). A killed command goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.labels import NEGATIVE
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.neighbors.approximate import import_faiss
from lacuna.tools.neighbors.featuring import Backbone
from lacuna.tools.neighbors.making import Wishes, aligned_features, make_neighbors
from lacuna.tools.passes.pool import absolute, add_pool_arguments, open_pool, pool_settings
from lacuna.tools.passes.trained import held
from lacuna.trainer.neighbors import DISTANCES, FACTS_NAME, MOST_NEIGHBORS

_MANY = 1_000_000  # samples above which an exact search takes long without GPUs


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="RUN|CHECKPOINT", help="whose backbone gives images' features")
    parser.add_argument("--shards", required=True, metavar="URL", help="the training data (holds index.json)")
    parser.add_argument("--labels", default="labels", metavar="SIDECAR", help="partial labels (default: labels)")
    parser.add_argument("--subset", help="rows that take part, as data.train.subset (default: all)")
    parser.add_argument("--out", required=True, metavar="URL", help="folder or URL for the result")
    parser.add_argument("-k", type=int, default=10, help="neighbours of a sample (default 10)")
    parser.add_argument("--distance", choices=DISTANCES, default="euclidean", help="default: euclidean")
    parser.add_argument("--search", choices=("exact", "ivf"), default="exact",
                        help="exact (default), or approximate by a faiss index held in memory")
    parser.add_argument("--median-sample", type=int, metavar="N",
                        help="medians of about N positives of a class instead of all (exact by default)")
    parser.add_argument("--memory-mb", type=float, default=1024, help="vectors that a worker keeps (default 1024)")
    parser.add_argument("--overwrite", action="store_true", help="replace a finished result")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    group = parser.add_argument_group("features of images, instead of RUN")
    group.add_argument("--features", metavar="URL", help="feature shards of the same samples, made before")
    group.add_argument("--backbone", help="as model.backbone, e.g. torchvision:resnet101")
    group.add_argument("--weights", default="default", help="as model.weights (default: default)")
    group.add_argument("--image-size", type=int, default=224, help="default 224")
    group.add_argument("--normalize", default="imagenet", help="as data.normalize (default: imagenet)")
    add_pool_arguments(parser)


def run(args: argparse.Namespace) -> None:
    source = ShardSource.load(args.shards, args.labels, args.subset)
    _check(args, source)
    out = absolute(args.out)
    backbone = Backbone(args.backbone, args.weights, args.image_size, args.normalize) if args.backbone else None
    features = aligned_features(args.features, source) if args.features else None
    wishes = Wishes(args.k, args.distance, args.search == "ivf", args.median_sample, int(args.memory_mb * 1e6))
    settings = pool_settings(args)
    holding = held(args.model, settings.folder) if args.model else contextlib.nullcontext()
    with holding as model, open_pool(settings) as pool:
        facts = make_neighbors(pool, source, features or model or backbone, out, wishes, args.parts)
    if args.json:
        print(json.dumps(facts))
        return
    print(f"{facts['out']}: {facts['k']} neighbours of {facts['samples']:,} samples, {facts['distance']} distance "
          f"{facts['mean_distance']:.3f} on average; they annotate {facts['near_classes']:.1f} of "
          f"{facts['classes']} classes a sample, at most {facts['slots']}")
    if facts["classes_without_positives"]:
        print(f"{len(facts['classes_without_positives'])} classes have no annotated positive, so no median: "
              f"{', '.join(facts['classes_without_positives'][:5])}, …")


def _check(args: argparse.Namespace, source: ShardSource) -> None:
    given = [flag for flag, value in (("RUN", args.model), ("--features", args.features),
                                      ("--backbone", args.backbone)) if value]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)}: give one of them.")
    if source.index.kind == "image" and not given:
        raise UserError(f"--shards {args.shards} holds images: name the RUN whose backbone is to look at them, a "
                        "--backbone, or --features that were made before.")
    if source.index.kind == "feature" and given:
        raise UserError(f"--shards {args.shards} holds features already: leave {given[0]} out.")
    if source.sidecar.unlisted == NEGATIVE:
        raise UserError(f"--labels {args.labels}: every label is known, so there is nothing to soften. Name a sidecar "
                        "of partial labels (`lacuna annotate` makes one).")
    samples = int(source.counts.sum())
    if not 1 <= args.k <= min(MOST_NEIGHBORS, samples - 1):
        raise UserError(f"-k {args.k}: legal are 1..{min(MOST_NEIGHBORS, samples - 1)} for {samples:,} samples.")
    if args.median_sample is not None and args.median_sample < 1:
        raise UserError(f"--median-sample {args.median_sample}: give a number above 0.")
    if args.memory_mb <= 0:
        raise UserError(f"--memory-mb {args.memory_mb}: give a number above 0.")
    if storage.exists(storage.join(args.out, FACTS_NAME)) and not args.overwrite:
        raise UserError(f"--out {args.out}: there is a finished result already. Choose another folder, or replace it "
                        "with --overwrite.")
    if args.search == "ivf":
        import_faiss()
        if not storage.is_local(args.out):
            raise UserError(f"--out {args.out}: faiss reads and writes local files only. Use a folder that all nodes "
                            "see, or --search exact.")
    elif samples > _MANY:
        print(f"{samples:,} samples: an exact search compares {samples**2:.1e} pairs. If that takes too long, use "
              "--search ivf (needs faiss).", file=sys.stderr)
