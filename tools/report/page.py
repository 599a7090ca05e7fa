"""The page: template, style, script and data in one file. Data travel as JSON; the script writes them as text only."""

from __future__ import annotations

import html
import json
import math
import time
from importlib import resources
from typing import Any

_FILES = {"/*style*/": ("page.css",), "/*script*/": ("charts.js", "headline.js", "page.js")}


def render(data: dict[str, Any]) -> str:
    folder = resources.files("lacuna.tools.report")
    page = (folder / "page.html").read_text("utf-8")
    names = ", ".join(run["name"] for run in data["runs"])
    page = page.replace("<!--title-->", html.escape(f"Lacuna: {names}"))
    for mark, files in _FILES.items():
        page = page.replace(mark, "\n".join((folder / file).read_text("utf-8") for file in files))
    made = {"made": time.strftime("%Y-%m-%d %H:%M"), **data}
    return page.replace("/*data*/", embedded(made))


def embedded(data: Any) -> str:
    """JSON that cannot end the script element it stands in; NaN and infinity, which JSON lacks, become null."""
    text = json.dumps(_finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
