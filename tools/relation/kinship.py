"""How near classes are in a hierarchy: WordNet, OpenImages' JSON, or lines `child<TAB>parent`.

Legend: S_ab = the largest 2·d / (2·d + up_a + up_b) over everything that a and b both are kinds of, where d is its
depth (roots have 1, counted along the longest way down) and up_· the fewest steps from a class up to it: Wu and
Palmer's likeness, also where a node has several parents.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from lacuna.basics.errors import UserError
from lacuna.basics.flag_text import flag_lines, flag_text
from lacuna.basics.json_text import parse_json
from lacuna.data_pipelines.annotation.hierarchy import ClassTree
from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.wordnet import WNID, WordNet

Parents = dict[str, list[str]]


def likeness(nodes: list[str | None], parents: Parents) -> np.ndarray:
    """float64 [L, L] of the classes' nodes; a class without one (None) is like no other."""
    depths: dict[str, int] = {}
    ways = [{} if node is None else _above(node, parents) for node in nodes]
    out = np.zeros((len(nodes), len(nodes)))
    for a, first in enumerate(ways):
        for b, second in enumerate(ways[: a + 1]):
            found = [2 * _depth(node, parents, depths) / (2 * _depth(node, parents, depths) + up + second[node])
                     for node, up in first.items() if node in second]
            out[a, b] = out[b, a] = max(found, default=0.0)
    return out


def wordnet_nodes(index: ShardIndex, wordnet: WordNet, synsets: dict[str, str]) -> list[str | None]:
    """The synset of every class: from the file, the dataset's own WNIDs, or the name's most usual meaning."""
    own = dict(zip(index.classes, index.class_ids, strict=False))
    found: list[str | None] = []
    for name in index.classes:
        wnid = synsets.get(name) or (own.get(name, "") if WNID.fullmatch(own.get(name, "")) else "")
        if wnid and wnid not in wordnet.words:
            raise UserError(f"class {name!r}: {wnid} is no noun of this WordNet. ImageNet's ids are of WordNet 3.0.")
        found.append(wnid or next(iter(wordnet.meanings(name)), None))
    return found


def read_synsets(url: str, index: ShardIndex) -> dict[str, str]:
    """Lines `class<TAB>wnid`."""
    found = {}
    for number, line in enumerate(flag_lines("--synsets", url), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, _, wnid = line.partition("\t")
        if name not in index.classes or not WNID.fullmatch(wnid.strip()):
            raise UserError(f"{url}, line {number}: {line!r} is not `class<TAB>wnid` with a class of {index.url} and "
                            "an id such as n02084071.")
        found[name] = wnid.strip()
    return found


def json_parents(url: str) -> Parents:
    """OpenImages' hierarchy: {"LabelName": "/m/…", "Subcategory": […], "Part": […]}, or the same with names."""
    parents: Parents = {}

    def walk(node: Any) -> str:
        name = str(node["LabelName"])
        parents.setdefault(name, [])
        for child in node.get("Subcategory", []):
            below = walk(child)
            if name not in parents[below]:
                parents[below].append(name)
        return name

    try:
        walk(parse_json(flag_text("--hierarchy", url)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"--hierarchy {url}: not as OpenImages writes it, with LabelName and Subcategory "
                        f"({type(error).__name__}: {error}).") from None
    return parents


def json_nodes(index: ShardIndex, parents: Parents, url: str) -> list[str | None]:
    """Classes by their stable ids, or by their names."""
    found = [next((name for name in pair if name in parents), None) for pair in
             zip(index.classes, index.class_ids or index.classes, strict=True)]
    if not any(found):
        raise UserError(f"--hierarchy {url}: none of the classes of {index.url} is in it (for example "
                        f"{(index.class_ids or index.classes)[:3]}).")
    return found


def tree_parents(tree: ClassTree) -> tuple[list[str | None], Parents]:
    parents: Parents = {}
    for path in tree.paths:
        for above, below in itertools.pairwise(path):
            parents[str(below)] = [str(above)]
    return [str(c) if len(tree.paths[c]) > 1 or c in tree.below else None for c in range(tree.classes)], parents


def _above(node: str, parents: Parents) -> dict[str, int]:
    steps, todo = {node: 0}, [node]
    for here in todo:
        for parent in parents.get(here, []):
            if parent not in steps:
                steps[parent] = steps[here] + 1
                todo.append(parent)
    return steps


def _depth(node: str, parents: Parents, known: dict[str, int]) -> int:
    """Longest way from a root, which has 1. Without recursion: a tree may be deeper than Python's stack."""
    todo = [node]
    while todo:
        here = todo[-1]
        missing = [parent for parent in parents.get(here, []) if parent not in known]
        if here in known or not missing:
            known.setdefault(here, 1 + max((known[parent] for parent in parents.get(here, [])), default=0))
            todo.pop()
        elif len(todo) > len(parents) + 1:
            raise UserError(f"the hierarchy's parents of {node!r} form a circle. Remove one of them.")
        else:
            todo.append(missing[0])
    return known[node]
