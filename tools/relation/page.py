"""The relation as one HTML file: a heat map in which classes that go together stand together, and a list."""

from __future__ import annotations

import base64
import html
import io

import numpy as np
from PIL import Image

_CELL, _MOST = 12, 400  # pixels per class; from so many classes on the map has one pixel per class and no names
_LISTED = 5
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:75rem;padding:0 1rem;color:#1a1a1a}
h1{font-size:1.5rem}.map{overflow:auto}text{font:9px system-ui,sans-serif}table{border-collapse:collapse}
td,th{text-align:left;padding:.2rem .6rem;border-bottom:1px solid #ddd}image{image-rendering:pixelated}"""


def render(relation: np.ndarray, classes: list[str], source: str) -> str:
    order = _together(relation)
    rows = "".join(f"<tr><td>{html.escape(classes[c])}</td><td>{html.escape(_nearest(relation, classes, c))}</td></tr>"
                   for c in order)
    return ("<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width'>"
            f"<title>Lacuna: relation of {len(classes)} classes</title><style>{_STYLE}</style></head><body>"
            f"<h1>Relation of {len(classes)} classes</h1><p>{html.escape(source)}. Row: the class whose score follows; "
            "column: the class that it follows. Darker is more; the diagonal is left white.</p>"
            f"<div class=map>{_map(relation[np.ix_(order, order)], [classes[c] for c in order])}</div>"
            f"<h2>Follows most</h2><table><tr><th>class</th><th>share of others</th></tr>{rows}</table></body></html>")


def _together(relation: np.ndarray) -> list[int]:
    """An order in which classes that follow each other are near."""
    if len(relation) < 3:
        return list(range(len(relation)))
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    both = relation + relation.T
    np.fill_diagonal(both, 0)
    far = 1 - both / max(both.max(), 1e-12)
    np.fill_diagonal(far, 0)
    return leaves_list(linkage(squareform(far, checks=False), "average")).tolist()


def _nearest(relation: np.ndarray, classes: list[str], c: int) -> str:
    others = relation[c].copy()
    others[c] = 0
    best = [k for k in np.argsort(-others, kind="stable")[:_LISTED] if others[k] > 0]
    return ", ".join(f"{classes[k]} {others[k]:.3f}" for k in best) or "none"


def _map(relation: np.ndarray, names: list[str]) -> str:
    others = relation.copy()
    np.fill_diagonal(others, 0)
    shade = 255 - (255 * others / max(others.max(), 1e-12)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(shade.astype(np.uint8)).save(buffer, "PNG")
    picture = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    cell, edge = (_CELL, 110) if len(names) <= _MOST else (1, 0)
    side = cell * len(names)
    words = "" if not edge else "".join(
        f"<text x={edge - 4} y={edge + cell * i + 9} text-anchor=end>{html.escape(name)}</text>"
        f"<text transform='translate({edge + cell * i + 9} {edge - 4}) rotate(-90)'>{html.escape(name)}</text>"
        for i, name in enumerate(names))
    return (f"<svg xmlns='http://www.w3.org/2000/svg' width={side + edge} height={side + edge} role=img "
            f"aria-label='heat map of the relation'>{words}<image href='{picture}' x={edge} y={edge} width={side} "
            f"height={side} preserveAspectRatio=none /></svg>")
