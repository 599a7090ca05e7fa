"""Run as a program: training's kinds of bf16 operations, forward and backward; exit code 0 if they work and are right.

Its process may die by SIGILL: only a child should run it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def results() -> list[torch.Tensor]:
    """Outputs and gradients of a matrix product and of convolutions, large enough for oneDNN's fastest kernels."""
    draw = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).requires_grad_()

    vectors, matrix = leaf(64, 512), leaf(256, 512)
    images, kernel = leaf(4, 64, 28, 28), leaf(64, 64, 3, 3)
    pointwise, depthwise = leaf(128, 64, 1, 1), leaf(64, 1, 3, 3)
    leaves = [vectors, matrix, images, kernel, pointwise, depthwise]
    outputs = [F.linear(vectors, matrix), F.conv2d(images, kernel, padding=1), F.conv2d(images, pointwise, stride=2),
               F.conv2d(images, depthwise, padding=1, groups=64)]
    loss = torch.stack([output.float().square().mean() for output in outputs]).sum()
    return [output.detach().float() for output in outputs] + list(torch.autograd.grad(loss, leaves))


def main() -> int:
    exact = results()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = results()
    # 8 bits of mantissa: sums of 500 products are off by less than this part of the largest number.
    right = all(bool((a - b).abs().max() <= 0.05 * a.abs().max()) for a, b in zip(exact, rounded, strict=True))
    return 0 if right else 3


if __name__ == "__main__":
    raise SystemExit(main())
