"""The part of the documentation that is made from the code: settings, commands, methods, the Python API.

mkdocs loads this file as a hook (mkdocs.yml). New settings, commands and methods appear by themselves. Links to files
outside docs/ are checked here, too: a site cannot hold them, so they become plain text.
"""

from __future__ import annotations

import html
import inspect
import os
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path

import lacuna
from lacuna.tools.bench import BENCHES
from lacuna.tools.cli import COMMANDS, leaves, open_command
from lacuna.tools.methods import describe
from lacuna.trainer.config import data_section, sections
from lacuna.trainer.methods import METHODS

DOCS = Path(__file__).resolve().parent
_TITLES = {"index.md": "Lacuna", "tutorials": "Tutorials", "reference": "Reference"}
# Pages in the order of reading; what is not here follows by name.
ORDER = ["index.md", "tutorials/own_images.md", "tutorials/openimages.md", "tutorials/real.md",
         "tutorials/from_cole.md", "tutorials/clusters.md", "training.md", "data.md", "using.md", "methods.md",
         "results.md", "scale.md", "api.md", "troubleshooting.md", "coming_from.md", "architecture.md"]


# ---- settings

def settings_page() -> str:
    lines = ["# Settings", "", "Every key of a config, as in YAML or on the command line (`section.key=value`). "
             "`phases` is a list: its keys are `phases.0.lr` and so on. The settings of a method are on the page of "
             "[methods](methods.md).", ""]
    for path, kind in config_sections():
        lines += [f"## `{path or 'top level'}`", "", _text(kind.__doc__) if kind.__doc__ else "", "",
                  "| key | default | legal | meaning |", "| --- | --- | --- | --- |"]
        for name, field in kind.model_fields.items():
            key = f"{path}.{name}".strip(".")
            lines.append(f"| `{key}` | {_default(field)} | {_cell(legal(field))} | {_cell(_text(field.description))} |")
        lines.append("")
    return "\n".join(lines)


def config_sections() -> Iterator[tuple[str, type[data_section.Section]]]:
    """Path and section, the top level first; a section that occurs twice is there twice."""
    def walk(path: str, kind: type[data_section.Section]) -> Iterator[tuple[str, type[data_section.Section]]]:
        yield path, kind
        for name, field in kind.model_fields.items():
            inner = _section_in(field.annotation)
            if inner is not None:
                number = ".N" if typing.get_origin(field.annotation) is list else ""
                yield from walk(f"{path}.{name}{number}".strip("."), inner)

    yield from walk("", sections.Config)


def _section_in(annotation: object) -> type[data_section.Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, data_section.Section):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _section_in(part))), None)


def _default(field) -> str:
    if field.is_required():
        return "**required**"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, data_section.Section):
        return "see below"
    if isinstance(value, tuple):
        return f"`[{', '.join(map(str, value))}]`"
    return f"`{'null' if value is None else str(value).lower() if isinstance(value, bool) else value}`"


def legal(field) -> str:
    """Legal values in words: choices, kind of value, limits."""
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    limits = [f"{sign} {getattr(item, name)}" for item in field.metadata for name, sign in signs.items()
              if getattr(item, name, None) is not None]
    return ", ".join([_kind(field.annotation), *limits])


def _kind(annotation: object) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_kind(part) for part in parts)
    if origin is typing.Annotated:
        return _kind(parts[0])
    if _section_in(annotation):
        return "list of sections" if origin is list else "section"
    if origin is tuple:
        return f"list of {_kind(parts[0])}" if parts[-1] is Ellipsis else f"list of {len(parts)} × {_kind(parts[0])}"
    names = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}
    return names.get(annotation, "keys and values") if isinstance(annotation, type) else "keys and values"


# ---- commands

def commands_page() -> str:
    os.environ["COLUMNS"] = "110"  # how wide argparse writes
    lines = ["# Commands", "", "What `lacuna COMMAND --help` prints. Exit codes: 0 done, 1 done but something is wrong "
             "with what was looked at, 2 a mistake in the command, 130 interrupted.", "",
             "| command | |", "| --- | --- |"]
    lines += [f"| [`{name}`](#{name}) | {_cell(text)} |" for name, (_, text) in COMMANDS.items()]
    for name in COMMANDS:
        parser = open_command(name)[1]
        lines += ["", f"## {name}", "", "```text", parser.format_help().rstrip(), "```"]
        for leaf in leaves(parser):
            if leaf is not parser:
                title = leaf.prog.removeprefix("lacuna ")
                lines += ["", f"### {title}", "", "```text", leaf.format_help().rstrip(), "```"]
    lines += ["", f"Benchmarks: {', '.join(BENCHES)}; `lacuna bench NAME --help` has their options.", ""]
    return "\n".join(lines)


# ---- methods

def methods_page() -> str:
    lines = ["# Every method", "", "What `lacuna methods NAME` prints, with the formulas of its file. "
             "[Methods](../methods.md) compares them.", ""]
    shown: set[str] = set()
    for name in METHODS:
        entry = describe(name)
        module = inspect.getmodule(METHODS[name])
        lines += [f"## `{name}`", "", f"*{_text(entry['paper'])}*", "", _text(entry["about"]), ""]
        if entry["module"] not in shown and module is not None and module.__doc__:
            shown.add(entry["module"])
            lines += ["```text", module.__doc__.strip(), "```", ""]
        size = entry["bytes_per_sample"]["80"]
        fields = ", ".join(f"`{f['field']}` ({f['dtype']})" for f in entry["state"])
        lines += [f"- Remembers per sample: {f'{fields}, {size:,} bytes at 80 classes' if fields else 'nothing'}",
                  f"- Needs: {_text(', '.join(entry['needs'])) or 'nothing but annotations'}"]
        rows = [f"{config} {numbers}" for of in entry["reported"].values() for config, numbers in of.items()]
        lines += [f"- Reported: {_text('; '.join(rows))}"] if rows else []
        if entry["settings"]:
            lines += ["", "| setting | default | meaning |", "| --- | --- | --- |"]
            lines += [f"| `method.{s['name']}` | {'**required**' if s['required'] else '`{}`'.format(s['default'])} "
                      f"| {_cell(_text(s['about']))} |" for s in entry["settings"]]
        lines.append("")
    return "\n".join(lines)


# ---- Python

def python_page() -> str:
    lines = ["# Python", "", "The names of `lacuna.__all__`; [From Python](../api.md) shows them at work.", ""]
    for name in lacuna.__all__:
        thing = getattr(lacuna, name)
        lines += [f"## `lacuna.{name}`", ""]
        if callable(thing):
            lines += ["```python", f"{'class ' if inspect.isclass(thing) else ''}{name}{_signature(thing)}", "```", ""]
        lines += ["```text", inspect.getdoc(thing) or "", "```", ""] if inspect.getdoc(thing) else []
        for part, value in vars(thing).items() if inspect.isclass(thing) else ():
            if not part.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                shown = part if isinstance(value, property) else f"{part}{_signature(value)}"
                lines += [f"- `{shown}`: {_text(inspect.getdoc(value))}"]
        lines.append("")
    return "\n".join(lines)


def _signature(thing: object) -> str:
    try:
        return str(inspect.signature(thing))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(…)"


def _text(text: str | None) -> str:
    """On one line, with nothing that Markdown or HTML would take for its own."""
    return re.sub(r"(?<![`\w])([*_])(?=\w)", r"\\\1", html.escape(" ".join((text or "").split()), quote=False))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


PAGES = {"reference/settings.md": settings_page, "reference/commands.md": commands_page,
         "reference/methods.md": methods_page, "reference/python.md": python_page}


# ---- what mkdocs calls

def on_files(files, config):
    from mkdocs.structure.files import File

    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_config(config):
    """The order of pages; new ones need no entry anywhere."""
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md") if "examples" not in path.parts}
    pages = [name for name in ORDER if name in there] + sorted(there - set(ORDER)) + list(PAGES)
    nav: list = [name for name in pages if "/" not in name]
    for folder in ("reference", "tutorials"):
        nav.insert(1, {_TITLES[folder]: [name for name in pages if name.startswith(f"{folder}/")]})
    config["nav"] = nav
    return config


_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown, page, config, files):
    """Links out of docs/ must lead to a file of the repository; on the site they are text."""
    if page.file.src_uri in PAGES:
        return markdown

    def resolve(match: re.Match) -> str:
        target = (DOCS / page.file.src_uri).parent / match[2]
        if not target.exists() and not (DOCS / page.file.src_uri).parent.joinpath(match[2]).resolve().is_relative_to(
                DOCS / "reference"):
            raise FileNotFoundError(f"{page.file.src_uri} links to {match[2]}, which is not there")
        inside = target.resolve().is_relative_to(DOCS) and target.suffix == ".md"
        return match[0] if inside or target.suffix in (".png", ".svg") else match[1]

    return _LINK.sub(resolve, markdown)
