"""Gradients between the backward and the optimizer, without ZeRO: averaged over ranks while the backward still runs,
and clipped without reading anything back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class Exchange:
    """Sends a bucket of gradients as soon as it is complete, in the same order on every rank: the last layers' first.

    The buckets are those that DeepSpeed would send after the backward, so that sums have the same bits.
    """

    def __init__(self, engine: Any, size: int, most: int):
        """`size`: of the world; `most`: numbers after which a bucket is closed."""
        self.engine, self.size = engine, size
        self.buckets: list[list[torch.nn.Parameter]] = [[]]
        for parameter in sendable(engine.module):
            if sum(p.numel() for p in self.buckets[-1]) > most:
                self.buckets.append([])
            self.buckets[-1].append(parameter)
        self.bucket_of = {parameter: place for place, bucket in enumerate(self.buckets) for parameter in bucket}
        self.hooks = [p.register_post_accumulate_grad_hook(self._ready) for p in self.bucket_of]
        self._restart()

    def close(self) -> None:
        """The model may learn on in another phase."""
        for hook in self.hooks:
            hook.remove()

    def _restart(self) -> None:
        self.missing = [len(bucket) for bucket in self.buckets]
        self.sent: list[tuple[torch.Tensor, Any]] = []  # buffers and their transfers, from the last bucket on

    def _ready(self, parameter: torch.Tensor) -> None:
        if not self.engine.is_gradient_accumulation_boundary():
            return
        self.missing[self.bucket_of[parameter]] -= 1  # type: ignore[index]
        while len(self.sent) < len(self.buckets) and not self.missing[self._next]:
            self._send()

    @property
    def _next(self) -> int:
        return len(self.buckets) - 1 - len(self.sent)

    def _send(self) -> None:
        for parameter in self.buckets[self._next]:
            if parameter.grad is None:  # every rank sends the same
                parameter.grad = torch.zeros_like(parameter)
        flat = _flatten_dense_tensors([p.grad for p in self.buckets[self._next]])
        self.sent.append((flat, dist.all_reduce(flat, async_op=True)))

    def finish(self) -> None:
        """After the backward: send what is left, and put the averages where the optimizer looks."""
        if not self.engine.is_gradient_accumulation_boundary():
            return
        while len(self.sent) < len(self.buckets):
            self._send()
        for bucket, (flat, transfer) in zip(reversed(self.buckets), self.sent, strict=True):
            transfer.wait()
            flat.mul_(1.0 / self.size)
            for parameter, average in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
                assert parameter.grad is not None  # sent
                if parameter.is_contiguous() and parameter.grad.is_contiguous():
                    parameter.grad = average  # a part of the message: a copy would be another pass over all gradients
                else:
                    parameter.grad.copy_(average)  # fused optimizers want the memory order of the parameter
        self._restart()


def sendable(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters whose gradients travel, in the order in which all ranks have them."""
    return [p for p in module.parameters() if p.requires_grad and p.numel()]


def clip(parameters: list[torch.nn.Parameter], most: float) -> None:
    """Scale all gradients so that their norm is at most `most`; they are equal on every rank."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = torch.stack(torch._foreach_norm(gradients)).pow(2).sum().sqrt()
    torch._foreach_mul_(gradients, (most / (total + 1e-6)).clamp(max=1.0))
