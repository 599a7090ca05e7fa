"""A filled table as people read it: Markdown, and one HTML file without scripts or network."""

from __future__ import annotations

import html
from typing import Any

from lacuna.trainer.config.reported import as_text

_HEAD = ["row", "ours", "reported", "difference", "seeds", "chosen by validation"]
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; } th, td { padding: .3rem .8rem; text-align: left; border-bottom: 1px solid #8884; }
td:nth-child(n+2):nth-child(-n+5) { text-align: right; font-variant-numeric: tabular-nums; }
pre { white-space: pre-wrap; }
"""


def cells(row: dict[str, Any]) -> list[str]:
    ours = row["ours"]
    only = list(ours) == ["mAP"]
    measured = [f"{'' if only else name + ' '}{n['mean']:.2f}" + (f" ± {n['std']:.2f}" if len(n["each"]) > 1 else "")
                for name, n in ours.items()]
    apart = [f"{'' if only else name + ' '}{value:+.2f}" for name, value in row["difference"].items()]
    chosen = ", ".join(f"{key} {value}" for key, value in (row["chosen"] or {}).items())
    reported = as_text(row["reported"]) if row["reported"] is not None else "–"
    return [row["row"], ", ".join(measured) or "–", reported, ", ".join(apart) or "–", str(len(row["seeds"])), chosen]


def as_markdown(body: dict[str, Any]) -> str:
    lines = [f"# {body['table']}", "", body["about"].strip().partition("\n")[0]]
    if body["source"]:
        lines += ["", f"Reported: {body['source']}. Ours: mean ± standard deviation over the seeds."]
    lines += ["", _line(_HEAD), _line(["---"] * len(_HEAD))]
    lines += [_line(cells(row)) for row in body["rows"]]
    missing = [row for row in body["rows"] if row["missing"]]
    if missing:
        lines += ["", "What is missing, and why:", ""] + [f"- {row['row']}: {row['missing']}" for row in missing]
    notes = [row for row in body["rows"] if row["note"]]
    return "\n".join([*lines, *([""] if notes else []), *(f"- {row['row']}: {row['note']}" for row in notes), ""])


def _line(words: list[str]) -> str:
    return "| " + " | ".join(word.replace("|", "\\|") for word in words) + " |"


def as_html(body: dict[str, Any]) -> str:
    head = "".join(f"<th>{html.escape(word)}</th>" for word in _HEAD)
    rows = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(row)) + "</tr>"
                     for row in body["rows"])
    remarks = [(row["row"], text) for row in body["rows"] for text in (row["missing"], row["note"]) if text]
    listed = "".join(f"<li><b>{html.escape(name)}</b>: {html.escape(text)}</li>" for name, text in remarks)
    source = f"<p>Reported: {html.escape(body['source'])}.</p>" if body["source"] else ""
    title = html.escape(body["table"])
    return (f"<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>{title}</title>"
            f"<style>{_STYLE}</style></head><body>\n<h1>{title}</h1>"
            f"<pre>{html.escape(body['about'].strip())}</pre>{source}\n<table><thead><tr>{head}</tr></thead>\n<tbody>\n"
            f"{rows}\n</tbody></table>\n{'<h2>Missing, and remarks</h2><ul>' + listed + '</ul>' if listed else ''}\n"
            "</body></html>\n")
