"""A WordNet of a dozen nouns, in the form of its own files."""

from __future__ import annotations

from pathlib import Path

# number → (words, what it is a kind of, gloss)
SYNSETS = {
    1: (["entity"], [], "that which is"),
    10: (["animal", "beast"], [1], "a living organism that moves"),
    11: (["dog", "domestic_dog"], [10], "a member of the genus Canis"),
    12: (["corgi"], [11], "short legs"),
    13: (["husky"], [11], "a sled dog"),
    14: (["mouse"], [10], "a small rodent"),
    15: (["kite"], [10], "a small hawk"),
    20: (["artifact"], [1], "a man-made object"),
    21: (["mouse", "computer_mouse"], [20], "moves the cursor"),
    22: (["kite"], [20], "a plaything on a string"),
    23: (["traffic_light"], [20], "a signal"),
    24: (["toy_dog"], [11, 20], "a kind of both"),
}
SENSES = {"mouse": [14, 21], "kite": [22, 15]}
WNID = "n{:08d}"


def write_wordnet(folder: Path) -> str:
    folder.mkdir()
    licence = "  1 This software and database is being provided to you\n"
    data, words = [], dict[str, list[int]]()
    for number, (names, parents, gloss) in SYNSETS.items():
        cells = [f"{number:08d}", "03", "n", f"{len(names):02x}"]
        cells += [cell for name in names for cell in (name, "0")]
        pointers = [("@" if i == 0 else "@i", parent) for i, parent in enumerate(parents)] + [("~", 99)]
        cells += [f"{len(pointers):03d}"] + [cell for symbol, other in pointers
                                             for cell in (symbol, f"{other:08d}", "n", "0000")]
        data.append(" ".join(cells) + f" | {gloss}  \n")
        for name in names:
            words.setdefault(name, []).append(number)
    index = [" ".join([word, "n", str(len(found)), "2 @ ~", str(len(found)), "0",
                       *(f"{number:08d}" for number in SENSES.get(word, found))]) + "  \n"
             for word, found in sorted(words.items())]
    (folder / "data.noun").write_text(licence + "".join(data))
    (folder / "index.noun").write_text(licence + "".join(index))
    return str(folder)
