"""Class priors: the probability of every class, estimated by a model that ignored unknown labels (Ben-Baruch et al.).

Two file forms, told apart by the file's ending:
  .csv   header `Classes,avg_pred`, one row a class, as the authors' code writes and ships it
  .json  {"classes": [names or ids], "prior": [numbers], …}, ours; further keys are for people
Where the class list is known, rows are matched by name; otherwise they must be in class order.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Sequence

import numpy as np

from lacuna.basics import storage
from lacuna.basics.errors import UserError

_HEADER = ["Classes", "avg_pred"]
_ADVICE = "Expected a .csv with the header `Classes,avg_pred`, or a .json with `classes` and `prior`."


def read_prior(url: str, classes: int, *names: Sequence[str]) -> np.ndarray:
    """float64 [L] in class order. `names`: known spellings of the class list (names, ids); empty ones are skipped."""
    keys, values = _read_rows(url)
    doubled = [key for key, count in Counter(keys).items() if count > 1]
    if doubled:
        # The authors' loader keeps one of them, which shifts every class that follows.
        raise UserError(f"prior {url}: class {doubled[0]!r} has {Counter(keys)[doubled[0]]} rows; one is allowed.")
    if len(keys) != classes:
        raise UserError(f"prior {url}: {len(keys)} classes, the data has {classes}. Estimate it on the same classes.")
    wrong = [(k, v) for k, v in zip(keys, values, strict=True) if not 0 <= v <= 1]
    if wrong:
        raise UserError(f"prior {url}: class {wrong[0][0]!r} has {wrong[0][1]}; priors are within [0, 1].")
    spellings = [spelling for spelling in names if len(spelling)]
    for spelling in spellings:
        if set(spelling) == set(keys):
            by_key = dict(zip(keys, values, strict=True))
            return np.array([by_key[name] for name in spelling])
    if spellings:
        strange = next((key for key in keys if not any(key in spelling for spelling in spellings)), keys[0])
        raise UserError(f"prior {url}: class {strange!r} is not a class of the data ({spellings[0][0]!r}, …). "
                        "Estimate the prior on the same classes.")
    return np.array(values)


def write_prior(url: str, names: Sequence[str], prior: np.ndarray, facts: dict | None = None) -> None:
    """In the form that the file's ending asks for; facts: further keys of a .json."""
    if url.endswith(".json"):
        text = json.dumps({"classes": list(names), "prior": [float(v) for v in prior], **(facts or {})},
                          ensure_ascii=False)
    elif url.endswith(".csv"):
        lines = io.StringIO()
        csv.writer(lines, lineterminator="\n").writerows([_HEADER, *([n, repr(float(v))] for n, v in
                                                                     zip(names, prior, strict=True))])
        text = lines.getvalue()
    else:
        raise UserError(f"prior {url}: write it to a .csv or .json file.")
    storage.write_atomic(url, text.encode())


def _read_rows(url: str) -> tuple[list[str], list[float]]:
    try:
        text = storage.read_bytes(url).decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"prior {url}: no such file. {_ADVICE}") from None
    except (UnicodeDecodeError, IsADirectoryError):
        raise UserError(f"prior {url}: not a text file. {_ADVICE}") from None
    rows = _json_rows(url, text) if url.endswith(".json") else _csv_rows(url, text)
    try:
        return [str(key) for key, _ in rows], [float(value) for _, value in rows]
    except (TypeError, ValueError) as error:
        raise UserError(f"prior {url}: {error}. {_ADVICE}") from None


def _csv_rows(url: str, text: str) -> list:
    try:
        rows = [row for row in csv.reader(io.StringIO(text)) if row]
    except csv.Error as error:
        raise UserError(f"prior {url}: {error}. {_ADVICE}") from None
    if not rows or [cell.strip() for cell in rows[0]] != _HEADER:
        raise UserError(f"prior {url}: the first line is {','.join(rows[0]) if rows else ''!r}. {_ADVICE}")
    for number, row in enumerate(rows[1:], 2):
        if len(row) != 2:
            raise UserError(f"prior {url}: line {number} has {len(row)} columns, not 2.")
    return rows[1:]


def _json_rows(url: str, text: str) -> list:
    try:
        body = json.loads(text)
        return list(zip(body["classes"], body["prior"], strict=True))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"prior {url}: {type(error).__name__}: {error}. {_ADVICE}") from None
