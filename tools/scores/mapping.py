"""Which of a classifier's own classes belong to which of ours: from a file, by WordNet ids, or a proposal to look over.

A mapping file has lines `our class<TAB>theirs; theirs; …`; theirs are WordNet ids, names, or numbers of outputs
(`#207`). Given a WordNet, an id stands for everything below it too: n02084071 (dog) is all of ImageNet's 118 breeds.
Classes that have no line, or nothing behind the tab, have no counterpart. `imagenet_coco`, `imagenet_voc` and
`imagenet_openimages` ship.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lacuna.basics.errors import UserError
from lacuna.basics.flag_text import flag_lines
from lacuna.basics.places import CONFIGS
from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.wordnet import WNID, WordNet
from lacuna.tools.scores.classifiers import ModelClass

Mapping = tuple[tuple[int, ...], ...]  # outputs of the model for each of our classes


@dataclass(frozen=True)
class Outputs:
    """A classifier's classes, to be found by what a mapping may call them."""

    classes: Sequence[ModelClass]
    wordnet: WordNet | None

    def of_wnid(self, wnid: str) -> list[int]:
        wanted = {wnid} if self.wordnet is None else self.wordnet.below(wnid)
        return [number for number, cls in enumerate(self.classes) if cls.wnid in wanted]

    def find(self, text: str) -> list[int]:
        """Empty if nothing is called so."""
        if WNID.fullmatch(text):
            return self.of_wnid(text)
        if re.fullmatch(r"#\d+", text):
            return [int(text[1:])] if int(text[1:]) < len(self.classes) else []
        return [number for number, cls in enumerate(self.classes)
                if text.lower() in (word.lower() for word in cls.words)]


def read_mapping(given: str, index: ShardIndex, outputs: Outputs) -> Mapping:
    """A file, or one of those that ship (configs/mappings) by its name."""
    ships = os.path.join(CONFIGS, "mappings", f"{given}.tsv")
    path = ships if os.path.exists(ships) else given
    found: dict[str, list[int]] = {}
    for number, line in enumerate(flag_lines("--mapping", path), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, tab, theirs = line.partition("\t")
        if name not in index.classes or not tab or name in found:
            why = "is there twice" if name in found else f"is no `class<TAB>theirs; …` with a class of {index.url}"
            raise UserError(f"{path}, line {number}: {name!r} {why}.")
        found[name] = []
        for text in filter(None, (part.strip() for part in theirs.split(";"))):
            numbers = outputs.find(text)
            if not numbers:
                hint = " itself; with --wordnet DIR its kinds count too" if WNID.fullmatch(text) and (
                    outputs.wordnet is None) else ""
                raise UserError(f"{path}, line {number}: the model has no class {text!r}{hint}.")
            found[name] += numbers
    return _checked(tuple(tuple(sorted(set(found.get(name, [])))) for name in index.classes), path)


def by_ids(index: ShardIndex, outputs: Outputs) -> Mapping:
    """For datasets whose stable class ids are WordNet's."""
    if not index.class_ids or not all(WNID.fullmatch(wnid) for wnid in index.class_ids):
        raise UserError(f"{index.url}: its classes are not WordNet ids, so say which of the model's classes are which: "
                        "--mapping FILE. --suggest-mapping FILE --wordnet DIR proposes one to look over.")
    return _checked(tuple(tuple(outputs.of_wnid(wnid)) for wnid in index.class_ids), "WordNet ids")


def _checked(mapping: Mapping, where: str) -> Mapping:
    if not any(mapping):
        raise UserError(f"{where}: none of the dataset's classes has a counterpart in the model.")
    return mapping


def suggest(index: ShardIndex, outputs: Outputs) -> tuple[str, list[str]]:
    """(text of a mapping file, our classes without a counterpart)."""
    wordnet = outputs.wordnet
    if wordnet is None:
        raise UserError("--suggest-mapping needs WordNet: --wordnet DIR with data.noun and index.noun (Debian's "
                        "package wordnet-base has them in /usr/share/wordnet).")
    lines = ["# our class<TAB>classes of the model. Look it over: a name may have been taken in another sense."]
    lacking = []
    for name in index.classes:
        meaning, how = _meaning(name, outputs, wordnet)
        if meaning is None:
            lacking.append(name)
            lines += [f"# {name}: no counterpart", f"{name}\t"]
            continue
        numbers = outputs.of_wnid(meaning)
        lines += [f"# {name}{how}: {meaning} {', '.join(wordnet.words[meaning])}: {wordnet.glosses[meaning]} "
                  f"({len(numbers)} classes, e.g. {outputs.classes[numbers[0]].words[0]})",
                  f"{name}\t{'; '.join(outputs.classes[number].wnid for number in numbers)}"]
    return "\n".join(lines) + "\n", lacking


def _meaning(name: str, outputs: Outputs, wordnet: WordNet) -> tuple[str | None, str]:
    """The most usual meaning of which the model knows a kind; of a name that WordNet lacks, of its last word."""
    for text, how in ((name, ""), (re.split(r"[\s_]+", name.strip())[-1], " (by its last word)")):
        for wnid in wordnet.meanings(text):
            if outputs.of_wnid(wnid):
                return wnid, how
        if wordnet.meanings(text):
            break
    return None, ""
