"""The findings as one HTML file: a sentence and a table each, with small pictures where samples are images."""

from __future__ import annotations

import base64
import html
import importlib.resources
import io
from typing import Any

from PIL import Image

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.decode import DecodeError, decode_image
from lacuna.data_pipelines.source import ShardSource

_SIDE = 96
# finding → (heading, what it means and what to do)
SECTIONS = {
    "leaks": ("The same sample in two splits", "Scores on val or test count these as learnt: remove one side."),
    "duplicates": ("Near-duplicates in the training set", "They count twice in every loss; often they disagree in "
                   "labels."),
    "wrong": ("Likely wrong annotations", "Annotated entries that the model believes to be the other kind: look at "
              "them in lacuna explore, view disagreement."),
    "outliers": ("Outliers", "Far from everything else in the training set: broken files, other sources, rare scenes."),
    "confused": ("Classes that are confused", "With the first class there and the second not, the model still believes "
                 "more in the second."),
    "few": ("Classes with too few labels", "Ask for more with lacuna select."),
}


def render(name: str, facts: dict[str, Any], findings: dict[str, list[dict]], totals: dict[str, int],
           sources: dict[str, ShardSource]) -> str:
    style = (importlib.resources.files(__package__) / "page.css").read_text("utf-8")
    parts = [f"<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width'>"
             f"<title>{html.escape(f'Lacuna audit: {name}')}</title><style>{style}</style></head><body>"
             f"<h1>Audit of {html.escape(name)}</h1><p>{html.escape(facts['summary'])}</p>"]
    for kind, (heading, text) in SECTIONS.items():
        rows = findings[kind]
        parts.append(f"<h2>{heading}: {totals[kind]:,}</h2>")
        if kind in facts["absent"]:
            parts.append(f"<p class=none>{html.escape(facts['absent'][kind])}</p>")
        elif rows:
            more = f" The first {len(rows)} are shown." if totals[kind] > len(rows) else ""
            parts.append(f"<p>{html.escape(text + more)}</p>{_table(rows, sources)}")
        else:
            parts.append("<p class=none>None found.</p>")
    return "".join(parts) + "</body></html>"


def _table(rows: list[dict], sources: dict[str, ShardSource]) -> str:
    names = list(rows[0])
    pictures = any(sources[place["split"]].index.kind == "image" for row in rows for place in row.values()
                   if isinstance(place, dict))
    head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{_cell(row[name], sources, pictures)}</td>" for name in names) + "</tr>"
                   for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any, sources: dict[str, ShardSource], pictures: bool) -> str:
    if not isinstance(value, dict):
        return html.escape(f"{value:.3f}" if isinstance(value, float) else str(value))
    text = html.escape(f"{value['split']} {value['key']}")
    return (_picture(sources[value["split"]], value["shard"], value["row"]) if pictures else "") + text


def _picture(source: ShardSource, shard: int, row: int) -> str:
    try:
        pixels = decode_image(source.open(shard).read(row)).permute(1, 2, 0).numpy()
    except (DecodeError, UserError):
        return ""
    picture = Image.fromarray(pixels)
    picture.thumbnail((_SIDE, _SIDE))
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "JPEG", quality=80)
    return f"<img alt='' src='data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}'>"
