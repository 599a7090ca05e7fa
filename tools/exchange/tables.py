"""Plain CSV: one line per entry, `key,name,label,score`, where label is positive, negative or (a suggestion) empty.

A sample of which nothing is known has one line with an empty name.
"""

from __future__ import annotations

import csv
import io

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.tools.exchange.bundle import Bundle, Marks, read_about, read_text

FILE = "labels.csv"
HEADER = ["key", "name", "label", "score"]


def write(bundle: Bundle, out: str) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(HEADER)
    for key, marks in bundle.samples.items():
        rows = [*([key, name, "positive", ""] for name in marks.positives),
                *([key, name, "negative", ""] for name in marks.negatives),
                *([key, name, "", repr(score)] for name, score in marks.suggested.items())]
        writer.writerows(rows or [[key, "", "", ""]])
    storage.write_atomic(storage.join(out, FILE), text.getvalue().encode())


def read(folder: str) -> Bundle:
    samples: dict[str, Marks] = {}
    names: dict[str, None] = {}
    lines = csv.DictReader(io.StringIO(read_text(folder, FILE), newline=""))
    if not set(HEADER[:3]) <= set(lines.fieldnames or ()):
        raise UserError(f"{storage.join(folder, FILE)}: columns {lines.fieldnames}; it needs {', '.join(HEADER)}.")
    for number, line in enumerate(lines, 2):
        marks, name, label = samples.setdefault(line["key"], Marks()), line["name"], (line["label"] or "").strip()
        if not name:
            continue
        names[name] = None
        try:
            if label in ("positive", "negative"):
                (marks.positives if label == "positive" else marks.negatives).append(name)
            elif label == "":
                marks.suggested[name] = float(line["score"])
            else:
                raise ValueError(f"label {label!r}, legal: positive, negative, nothing with a score")
        except (ValueError, TypeError) as error:
            raise UserError(f"{storage.join(folder, FILE)}, line {number}: {error}.") from None
    return Bundle(read_about(folder).get("classes", list(names)), samples)
