"""Gradient accumulation for losses with a term over the whole global batch: two forwards of every piece.

The first, without gradients, collects the outputs of the rank's share of the batch. The loss of the whole gives its
gradient by the outputs; the second forward of a piece carries its part of that gradient into the weights. Memory holds
the activations of one piece, and the outputs of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from lacuna.basics.errors import UserError
from lacuna.trainer.methods.base import Method, Outputs
from lacuna.trainer.models.classifier import Classifier


def check_two_forwards(method: Method, name: str, model: Classifier, micro_batch: int) -> None:
    """Refuse what two forwards cannot make equal to one of the whole batch."""
    cut = f"method.name = {name!r} has a term over the whole global batch, which train.micro_batch = {micro_batch} cuts"
    remedy = "Use micro_batch=0, more ranks, or a smaller phase batch."
    model.train()
    if any(isinstance(module, _BatchNorm) and module.training for module in model.modules()):
        raise UserError(f"{cut}, and BatchNorm would take the statistics of single pieces. Set model.batchnorm=frozen. "
                        f"Or: {remedy}")
    if method.needs().strong_view or model.extra is not None:
        raise UserError(f"{cut}; its second view or own module would need gradients that are not cached. {remedy}")


class Gathered:
    """Outputs of all pieces as one, of which the loss may ask gradients."""

    def __init__(self, pieces: list[Outputs]):
        self.sizes = [len(piece.logits) for piece in pieces]
        logits, maps, features = (_joined(parts) for parts in zip(*map(_tensors, pieces), strict=True))
        assert logits is not None
        self.outputs = Outputs(logits, maps, features)

    def gradients(self) -> Iterator[tuple[torch.Tensor | None, ...]]:
        """After backward: ∂loss by every kind of output of every piece; None where the loss does not depend on it."""
        parts = [None if leaf is None or leaf.grad is None else leaf.grad.split(self.sizes)
                 for leaf in _tensors(self.outputs)]
        for piece in range(len(self.sizes)):
            yield tuple(None if part is None else part[piece] for part in parts)


def gather_outputs(pieces: list[torch.Tensor], forward: Callable[[torch.Tensor], Outputs],
                   seeds: list[int]) -> Gathered:
    """The first forward; with a piece's seed its dropout is the same in the second."""
    found = []
    with torch.no_grad():
        for inputs, seed in zip(pieces, seeds, strict=True):
            torch.manual_seed(seed)
            found.append(forward(inputs))
    return Gathered(found)


def carried(outputs: Outputs, gradients: tuple[torch.Tensor | None, ...]) -> torch.Tensor:
    """A scalar whose gradient by the outputs is the given one."""
    parts = [(leaf * gradient).sum() for leaf, gradient in zip(_tensors(outputs), gradients, strict=True)
             if leaf is not None and gradient is not None]
    return torch.stack(parts).sum()


def _joined(parts: tuple[torch.Tensor | None, ...]) -> torch.Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given).requires_grad_() if given else None


def _tensors(outputs: Outputs) -> tuple[torch.Tensor | None, ...]:
    return outputs.parts
