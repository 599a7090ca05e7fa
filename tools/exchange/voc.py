"""PASCAL VOC's classification files: per class a list of `key 1` and `key -1`, and results with `key score`.

What is in no list of a class is unknown. Class names are percent-encoded where a file name cannot hold them.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.tools.exchange.bundle import Bundle, Marks, read_text

SETS, RESULTS, SPLIT = "ImageSets/Main", "results/Main", "train"
_WORDS = {"1": "positives", "-1": "negatives"}


def write(bundle: Bundle, out: str) -> None:
    lines: dict[str, list[str]] = {name: [] for name in bundle.classes}
    scores: dict[str, list[str]] = {name: [] for name in bundle.classes}
    for key, marks in bundle.samples.items():
        if any(letter in key for letter in "\r\n"):
            raise UserError(f"sample {key!r}: a list of VOC has one key per line.")
        for name in marks.positives:
            lines[name].append(f"{key}  1\n")
        for name in marks.negatives:
            lines[name].append(f"{key} -1\n")
        for name, score in marks.suggested.items():
            scores[name].append(f"{key} {score!r}\n")
    _write(out, f"{SETS}/{SPLIT}.txt", [f"{key}\n" for key in bundle.samples])
    _write(out, f"{SETS}/classes.txt", [f"{_file(name)}\n" for name in bundle.classes])
    for name in bundle.classes:
        _write(out, f"{SETS}/{_file(name)}_{SPLIT}.txt", lines[name])
        _write(out, f"{RESULTS}/comp1_cls_{SPLIT}_{_file(name)}.txt", scores[name])


def _write(out: str, name: str, lines: list[str]) -> None:
    storage.write_atomic(storage.join(out, name), "".join(lines).encode())


def _file(name: str) -> str:
    encoded = quote(name, safe=" ()&,'+=@!")
    return encoded.replace(".", "%2E") if encoded.startswith(".") else encoded


def read(folder: str) -> Bundle:
    samples = {line: Marks() for line in read_text(folder, f"{SETS}/{SPLIT}.txt").splitlines() if line}
    files = [line for line in read_text(folder, f"{SETS}/classes.txt").splitlines() if line]
    for file in files:
        for key, word, where in _rows(folder, f"{SETS}/{file}_{SPLIT}.txt"):
            if word not in _WORDS and word != "0":  # 0 is VOC's "difficult": neither
                raise UserError(f"{where}: {word!r}, legal are 1, -1 and 0.")
            if word in _WORDS:
                getattr(samples.setdefault(key, Marks()), _WORDS[word]).append(unquote(file))
        for key, word, where in _rows(folder, f"{RESULTS}/comp1_cls_{SPLIT}_{file}.txt"):
            try:
                samples.setdefault(key, Marks()).suggested[unquote(file)] = float(word)
            except ValueError:
                raise UserError(f"{where}: {word!r} is not a score.") from None
    return Bundle([unquote(file) for file in files], samples)


def _rows(folder: str, name: str) -> list[tuple[str, str, str]]:
    if not storage.exists(storage.join(folder, name)):
        return []
    lines = [line.rsplit(None, 1) for line in read_text(folder, name).splitlines() if line.strip()]
    if any(len(line) != 2 for line in lines):
        raise UserError(f"{storage.join(folder, name)}: a line without a key and a number.")
    return [(line[0].rstrip(), line[1], f"{storage.join(folder, name)}, {line[0]}") for line in lines]
