"""How much classes have to do with each other, as a matrix that the method `scpnet` follows.

  lacuna relation labels --shards shards/coco14/train --labels labels --out coco.npz       counted in full labels
  lacuna relation beliefs runs/coco-an --out coco.npz                  what a run's model believes of its training set
  lacuna relation beliefs shards/coco14/clip --shards shards/coco14/train --out coco.npz   the same from a score table
  lacuna relation text shards/coco14/clip.text.npz --shards shards/coco14/train --out coco.npz  embeddings of names
  lacuna relation hierarchy --wordnet /usr/share/wordnet --shards shards/coco14/train --out coco.npz
Then: method.name=scpnet method.relation=coco.npz. A page with a heat map is written beside it (coco.html).
A row keeps 1 − SHARE for its own class and shares the rest out among its K − 1 nearest others; a softmax with the
temperature follows. The defaults are SCPNet's for COCO with text embeddings (--neighbors 62; NUS 50, VOC and CUB all;
temperature 0.2 for COCO and NUS, 0.3 for VOC and CUB). --temperature 0 leaves the shares as they are.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.annotation.hierarchy import ClassTree
from lacuna.data_pipelines.annotation.labelled_rows import LabelledRows
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.subsets import Subset
from lacuna.data_pipelines.wordnet import WordNet
from lacuna.tools.passes.datasets import training_set
from lacuna.tools.passes.pool import add_pool_arguments, pool_settings
from lacuna.tools.passes.trained import held
from lacuna.tools.relation import kinship
from lacuna.tools.relation.counting import from_labels, from_run, from_table
from lacuna.tools.relation.page import render
from lacuna.tools.relation.smoothing import relation_of
from lacuna.trainer.class_vectors import read_class_vectors
from lacuna.trainer.relations import write_relation

Found = tuple[np.ndarray, ShardIndex, str]  # likeness [L, L], whose classes, what it was made from


def configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True, metavar="FROM")

    def add(name: str, text: str, make: Callable[[argparse.Namespace], Found],
            shards: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.add_argument("--shards", required=shards, metavar="URL", help="dataset folder with index.json: its classes")
        sub.add_argument("--out", required=True, metavar="FILE", help="the relation, .npz; a page .html beside it")
        sub.add_argument("--neighbors", type=int, metavar="K", help="classes that a row may name, its own included "
                         "(default: all)")
        sub.add_argument("--share", type=float, default=0.2, help="of a row that goes to other classes (default 0.2)")
        sub.add_argument("--temperature", type=float, default=0.2, help="of the softmax; 0: none (default 0.2)")
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of text")
        sub.set_defaults(make=make)
        return sub

    labels = add("labels", "how often classes are together in images with known labels", _labels)
    labels.add_argument("--labels", default="labels", metavar="NAME", help="sidecar with full labels (default: labels)")
    labels.add_argument("--subset", metavar="NAME", help="only these rows (default: all)")
    beliefs = add("beliefs", "how often a model believes that classes are together", _beliefs, shards=False)
    beliefs.add_argument("model", metavar="RUN|CHECKPOINT|TABLE", help="a run, or a table of `lacuna scores` or "
                         "`lacuna import-scores` (with --shards)")
    beliefs.add_argument("--table", default="scores", metavar="NAME", help="which one of a TABLE's (default: scores)")
    beliefs.add_argument("--subset", metavar="NAME", help="only these rows, of a run's model (default: the run's)")
    add_pool_arguments(beliefs)
    text = add("text", "how alike the embeddings of class names are (their cosine)", _text)
    text.add_argument("embeddings", metavar="FILE", help="the .text.npz that `lacuna scores` wrote, or .npy [L, D]")
    tree = add("hierarchy", "how near classes are in a hierarchy (Wu and Palmer's likeness)", _hierarchy)
    tree.add_argument("--wordnet", metavar="DIR", help="folder with data.noun and index.noun of WordNet 3.0")
    tree.add_argument("--synsets", metavar="FILE", help="with --wordnet: lines `class<TAB>wnid` for names whose most "
                      "usual meaning is another (mouse, orange, …)")
    tree.add_argument("--hierarchy", metavar="FILE", help="OpenImages' hierarchy as JSON")
    tree.add_argument("--parents", metavar="FILE", help="lines `child<TAB>parent`")


def run(args: argparse.Namespace) -> None:
    _check(args)
    likeness, index, source = args.make(args)
    if args.neighbors is not None and args.neighbors > len(index.classes):
        raise UserError(f"--neighbors {args.neighbors}: there are {len(index.classes)} classes.")
    relation = relation_of(likeness, args.neighbors, args.share, args.temperature)
    write_relation(args.out, relation, index.classes, source)
    page = os.path.splitext(args.out)[0] + ".html"
    storage.write_atomic(page, render(relation, index.classes, source).encode())
    alone = [index.classes[c] for c in np.flatnonzero(np.diag(relation) == 1)]
    facts = {"relation": args.out, "page": page, "classes": len(index.classes), "source": source,
             "own_share": float(np.diag(relation).mean()), "without_neighbors": alone}
    if args.json:
        print(json.dumps(facts))
        return
    print(f"{args.out}, {page}: {len(index.classes)} classes from {source}; a class keeps "
          f"{facts['own_share']:.2f} to itself on average")
    if alone:
        print(f"{len(alone)} classes have to do with no other: {', '.join(alone[:5])}{' …' if alone[5:] else ''}")


def _check(args: argparse.Namespace) -> None:
    if not args.out.endswith(".npz"):
        raise UserError(f"--out {args.out}: an .npz file is written, so the name must end with .npz.")
    if not 0 <= args.share <= 1:
        raise UserError(f"--share {args.share}: legal are numbers from 0 to 1, such as 0.2.")
    if not args.temperature >= 0:
        raise UserError(f"--temperature {args.temperature}: legal are numbers of at least 0, such as 0.2.")
    if args.neighbors is not None and args.neighbors < 1:
        raise UserError(f"--neighbors {args.neighbors}: at least 1 is needed, the class itself.")


def _labels(args: argparse.Namespace) -> Found:
    index = ShardIndex.load(args.shards)
    subset = Subset.load(index, args.subset) if args.subset else None
    rows = LabelledRows(index, Sidecar.load(index, args.labels), subset)
    return from_labels(rows), index, f"labels {args.labels} of {args.shards}"


def _beliefs(args: argparse.Namespace) -> Found:
    if storage.exists(storage.join(args.model, "zarr.json")):
        if not args.shards:
            raise UserError(f"{args.model} is a score table: name its dataset with --shards.")
        index = ShardIndex.load(args.shards)
        return from_table(args.model, index, args.table), index, f"scores {args.table} of {args.model}"
    settings = pool_settings(args)
    with held(args.model, settings.folder) as trained:
        source = training_set(trained, args.shards, None, args.subset)
        return from_run(trained, source, settings), source.index, f"beliefs of {trained.checkpoint}"


def _text(args: argparse.Namespace) -> Found:
    index = ShardIndex.load(args.shards)
    vectors = read_class_vectors(args.embeddings, index.classes, "embeddings").astype(np.float64)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    units = vectors / np.where(lengths == 0, 1, lengths)
    return units @ units.T, index, f"cosines of {args.embeddings}"


def _hierarchy(args: argparse.Namespace) -> Found:
    given = [flag for flag in ("wordnet", "hierarchy", "parents") if getattr(args, flag)]
    if len(given) != 1:
        raise UserError(f"{' and '.join('--' + flag for flag in given) or 'no hierarchy'}: give one of --wordnet DIR, "
                        "--hierarchy FILE and --parents FILE.")
    index = ShardIndex.load(args.shards)
    if args.wordnet:
        wordnet = WordNet.load(args.wordnet)
        synsets = kinship.read_synsets(args.synsets, index) if args.synsets else {}
        nodes, parents = kinship.wordnet_nodes(index, wordnet, synsets), wordnet.parents
    elif args.hierarchy:
        parents = kinship.json_parents(args.hierarchy)
        nodes = kinship.json_nodes(index, parents, args.hierarchy)
    else:
        nodes, parents = kinship.tree_parents(ClassTree.load(args.parents, index))
    return kinship.likeness(nodes, parents), index, f"hierarchy {getattr(args, given[0])}"
