"""The tuned protocol of `bench quality`: the head's recipe, the same for every method on features and on photos."""

from __future__ import annotations

MODEL = {"head_bias": "prior", "head_norm": "l2"}
SCHEDULE = "cosine"
# λ of λ/2·‖W‖² belongs to a loss that sums over classes and is a mean over images. Most are means over classes, too:
# λ/L for them. The last ones sum over the images as well, as published: λ times the batch.
_SUM_OVER_CLASSES, _SUM_OVER_ALL = ("softmax", "se"), ("asl", "hill", "splc", "csl")


def head_decay(method: str, decay: float, classes: int, batch: int) -> float:
    """`head_weight_decay` of a method for the λ `decay`."""
    if method in _SUM_OVER_ALL:
        return decay * batch
    return decay if method in _SUM_OVER_CLASSES else decay / classes


def trials(name: str, decays: tuple[float, ...], lrs: tuple[float, float], *settings: dict, **other: str) -> list[dict]:
    """Eight: two learning rates, or two settings of the method's own at the first of them, with four decays."""
    fixed = settings[0] if settings else {}
    pairs = [(lrs[0], own) for own in settings] if len(settings) == 2 else [(lr, fixed) for lr in lrs]
    assert len(pairs) * len(decays) == 8, name
    return [{"lr": lr, "decay": decay, "method": {"name": name, **own}, **other}
            for decay in decays for lr, own in pairs]
