"""WordNet's nouns: which meanings a word has, and what each of them is a kind of.

Read from the files that WordNet itself comes in (data.noun and index.noun; Debian has them as wordnet-base, in
/usr/share/wordnet). A synset is named as ImageNet names it: `n` and its eight digits. ImageNet's names are those of
WordNet 3.0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from lacuna.basics import storage
from lacuna.basics.errors import UserError

WNID = re.compile(r"n\d{8}")
_HYPERNYMS = ("@", "@i")


@dataclass(frozen=True)
class WordNet:
    words: dict[str, list[str]]  # wnid → its words
    glosses: dict[str, str]
    parents: dict[str, list[str]]  # wnid → what it is a kind of
    senses: dict[str, list[str]]  # word with spaces, in small letters → its wnids, the most usual first

    def meanings(self, name: str) -> list[str]:
        """wnids of a class name, as it stands or in the singular; the most usual first."""
        word = " ".join(re.split(r"[\s_]+", name.strip().lower()))
        singular = next((word.removesuffix(end) + new for end, new in _SINGULARS if word.endswith(end) and
                         word.removesuffix(end) + new in self.senses), "")
        return self.senses.get(word) or self.senses.get(singular, [])

    @cached_property
    def children(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for wnid, parents in self.parents.items():
            for parent in parents:
                found.setdefault(parent, []).append(wnid)
        return found

    def below(self, wnid: str) -> set[str]:
        """Every kind of a synset, and itself."""
        found, todo = {wnid}, [wnid]
        while todo:
            for child in self.children.get(todo.pop(), []):
                if child not in found:
                    found.add(child)
                    todo.append(child)
        return found

    @classmethod
    def load(cls, folder: str) -> WordNet:
        words, glosses, parents = dict[str, list[str]](), dict[str, str](), dict[str, list[str]]()
        for where, line in _lines(folder, "data.noun"):
            try:
                facts, _, gloss = line.partition("|")
                cells = facts.split()
                count = int(cells[3], 16)
                pointers = cells[5 + 2 * count:]
                wnid = _wnid(cells[0])
                words[wnid] = [word.replace("_", " ") for word in cells[4:4 + 2 * count:2]]
                glosses[wnid] = gloss.strip()
                parents[wnid] = [_wnid(pointers[i + 1]) for i in range(0, 4 * int(cells[4 + 2 * count]), 4)
                                 if pointers[i] in _HYPERNYMS]
            except (IndexError, ValueError):
                raise _damaged(where) from None
        senses = {}
        for where, line in _lines(folder, "index.noun"):
            try:
                cells = line.split()
                senses[cells[0].replace("_", " ")] = [_wnid(cell) for cell in cells[len(cells) - int(cells[2]):]]
            except (IndexError, ValueError):
                raise _damaged(where) from None
        return cls(words, glosses, parents, senses)


_SINGULARS = (("ies", "y"), ("ses", "s"), ("xes", "x"), ("ches", "ch"), ("shes", "sh"), ("s", ""))


def _wnid(offset: str) -> str:
    return f"n{int(offset):08d}"


def _damaged(where: str) -> UserError:
    return UserError(f"{where}: not as WordNet's files are written. Give --wordnet the folder of WordNet 3.0 itself.")


def _lines(folder: str, name: str) -> list[tuple[str, str]]:
    """(file and line, text) without the licence at the top, whose lines start with a space."""
    url = storage.join(folder, name)
    try:
        text = storage.read_bytes(url).decode()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"--wordnet {folder}: there is no {name}. Give the folder that holds WordNet 3.0's data.noun "
                        "and index.noun (Debian's package wordnet-base: /usr/share/wordnet).") from None
    except UnicodeDecodeError:
        raise _damaged(url) from None
    return [(f"{url}, line {number}", line) for number, line in enumerate(text.splitlines(), 1)
            if line and not line.startswith(" ")]
