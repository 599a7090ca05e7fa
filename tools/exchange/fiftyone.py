"""FiftyOne's dataset folder: metadata.json, samples.json and data/, written and read without its database.

The form without a version, which `fo.Dataset.from_dir(DIR, fo.types.FiftyOneDataset)` opens.
Labels are Classifications: `ground_truth`, `absent` (known not to be there) and `predictions` with confidences.
"""

from __future__ import annotations

import hashlib

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.tools.exchange.bundle import Bundle, Marks, key_of, read_about, read_json, write_json

DATA, META, SAMPLES = "data", "metadata.json", "samples.json"
_KNOWN = {"ground_truth": "positives", "absent": "negatives"}
_SUGGESTED = "predictions"


def write(bundle: Bundle, out: str) -> None:
    write_json(out, META, {"name": "lacuna", "media_type": "image", "info": {"classes": bundle.classes}})
    samples = []
    for key, marks in bundle.samples.items():
        body: dict = {"filepath": f"{DATA}/{bundle.files.get(key, key)}", "tags": [], "metadata": None,
                      "_media_type": "image"}
        for field, part in _KNOWN.items():
            body[field] = _classifications(key, field, dict.fromkeys(getattr(marks, part)))
        body[_SUGGESTED] = _classifications(key, _SUGGESTED, dict(marks.suggested))
        samples.append(body)
    write_json(out, SAMPLES, {"samples": samples})


def _classifications(key: str, field: str, names: dict[str, float | None]) -> dict:
    def one(name: str, score: float | None) -> dict:
        number = hashlib.sha256(f"{field}\0{key}\0{name}".encode()).hexdigest()[:24]
        return {"_id": {"$oid": number}, "_cls": "Classification", "tags": [], "label": name,
                **({} if score is None else {"confidence": score})}

    return {"_cls": "Classifications", "classifications": [one(name, score) for name, score in names.items()]}


def read(folder: str) -> Bundle:
    samples: dict[str, Marks] = {}
    names: dict[str, None] = {}
    try:
        for body in read_json(folder, SAMPLES)["samples"]:
            marks = samples[key_of(str(body["filepath"]), DATA)] = Marks()
            for field, part in _KNOWN.items():
                getattr(marks, part).extend(str(one["label"]) for one in _labels(body, field))
            marks.suggested |= {str(one["label"]): float(one["confidence"]) for one in _labels(body, _SUGGESTED)}
            names |= dict.fromkeys((*marks.positives, *marks.negatives, *marks.suggested))
        info = read_json(folder, META).get("info") or {}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{storage.join(folder, SAMPLES)}: not a dataset of FiftyOne with classifications "
                        f"({type(error).__name__}: {error}).") from None
    return Bundle(info.get("classes") or read_about(folder).get("classes", list(names)), samples)


def _labels(body: dict, field: str) -> list[dict]:
    """Of Classifications, or of a single Classification."""
    found = body.get(field) or {}
    return [found] if found.get("_cls") == "Classification" else found.get("classifications", [])
