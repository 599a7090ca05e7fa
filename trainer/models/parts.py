"""Parts of a backbone by the names its publisher gave them, to train some of them and keep the others fixed."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from lacuna.basics.errors import UserError

_MOST_SHOWN = 16


def published_names(body: nn.Module, part: nn.Module) -> dict[str, str]:
    """{name in `part`: name in `body`} of modules and parameters; `part` is what leads to the feature map of `body`."""
    theirs = {id(item): name for name, item in _items(body)}
    return {name: theirs.get(id(item), name) for name, item in _items(part)}


def _items(module: nn.Module) -> Iterator[tuple[str, object]]:
    yield from module.named_modules()
    yield from module.named_parameters()


def learning(names: dict[str, str], trainable: str | tuple[str, ...]) -> set[str]:
    """Names of the modules and parameters that learn when `trainable` does: 'head', 'all', or parts by name."""
    if isinstance(trainable, str):
        return set(names) if trainable == "all" else set()
    wanted = [name for name in trainable if name != "head"]
    return {name for name, published in names.items() if any(_within(published, part) for part in wanted)}


def check_parts(backbone: nn.Module, names: dict[str, str], trainable: str | tuple[str, ...], key: str,
                backbone_name: str) -> None:
    """Every part is one of the backbone and has weights."""
    weights = [names[name] for name, _ in backbone.named_parameters()]
    for part in () if isinstance(trainable, str) else trainable:
        if part == "head" or any(_within(name, part) for name in weights):
            continue
        if not weights:
            raise UserError(f"{key} names {part!r}, but model.backbone = {backbone_name!r} has nothing to train. "
                            "Write 'head'.")
        parent = part
        while parent and not any(_within(name, parent) for name in weights):
            parent = parent.rpartition(".")[0]
        legal = list(dict.fromkeys(_child(name, parent) for name in weights if not parent or _within(name, parent)))
        shown = ", ".join(legal[:_MOST_SHOWN]) + (f" … {legal[-1]}" if len(legal) > _MOST_SHOWN else "")
        inside = f"in its {parent!r} there are" if parent else "write 'head' or parts of it:"
        raise UserError(f"{key} names {part!r}, but model.backbone = {backbone_name!r} has no such part with weights; "
                        f"{inside} {shown}.")


def _within(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def _child(name: str, parent: str) -> str:
    """The name up to the level below `parent`."""
    depth = parent.count(".") + 2 if parent else 1
    return ".".join(name.split(".")[:depth])
