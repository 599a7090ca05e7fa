"""What a vision-language model is told about a class: templates with {} for its name, own ones or from a file."""

from __future__ import annotations

from collections.abc import Sequence

from lacuna.basics.errors import UserError
from lacuna.basics.flag_text import flag_lines

PROMPTS = {
    "name": ("{}",),
    "photo": ("a photo of a {}.",),
    "scenes": ("a photo of a {}.", "a photo with a {} in it.", "a close-up of a {}.", "a {} in the background.",
               "several of the kind {}.", "a small {} in a larger scene.", "a part of a {}."),
}


def read_prompts(given: str) -> tuple[str, ...]:
    """A set by its name, or a file with one template on each line."""
    if given in PROMPTS:
        return PROMPTS[given]
    templates = tuple(line.strip() for line in flag_lines("--prompts", given) if line.strip())
    wrong = next((line for line in templates if line.count("{}") != 1), None)
    if wrong is not None or not templates:
        raise UserError(f"--prompts {given}: {wrong!r} is no template. Write lines such as `a photo of a {{}}.`, or "
                        f"name one of the sets {', '.join(PROMPTS)}.")
    return templates


def read_names(path: str | None, classes: Sequence[str]) -> list[str]:
    """How each class is called in prompts: its own name, or what the lines `class<TAB>name` say."""
    names = {name: name.replace("_", " ") for name in classes}
    for number, line in enumerate(flag_lines("--names", path) if path else [], 1):
        name, tab, text = line.partition("\t")
        if line.strip() and (name not in names or not text.strip()):
            raise UserError(f"{path}, line {number}: {line!r} is not `class<TAB>name` with a class of the dataset.")
        if tab:
            names[name] = text.strip()
    return [names[name] for name in classes]
