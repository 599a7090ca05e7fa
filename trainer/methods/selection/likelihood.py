"""The likelihood of partial labels under two ways in which they arise, with p = σ(a) independent over classes.

fixed        an annotator shows m of the positives, each choice of m equally likely, whatever their number:
             P = Π_shown p · Π_negatives (1 − p) · E[1 / C(m + h, m)], h the number of hidden positives (hidden.py).
             A row without a shown positive (m = 0) says nothing about its unknown entries.
independent  every positive of class j is shown with probability q_j, on its own:
             P = Π_shown q p · Π_negatives (1 − p) · Π_unknown (1 − q p). A row without a shown positive does speak.

Both give −ln P and p − E[y | labels], which is its derivative by the logits (Fisher's identity), without a graph, in
float32 (float64 for float64 logits). Blocks of rows bound the memory, whatever the number of classes.

Legend: B rows, L classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lacuna.trainer.methods.base import positive, unknown
from lacuna.trainer.methods.known_gradient import WithGradient, cached_blocks, numbers
from lacuna.trainer.methods.selection.hidden import LARGEST, NODES, Hidden, integrate


@dataclass(frozen=True)
class Likelihood:
    surprise: torch.Tensor  # [B] −ln P
    residual: torch.Tensor  # [B, L] p − E[y]

    def posterior(self, logits: torch.Tensor) -> torch.Tensor:
        """E[y | logits, labels] [B, L]."""
        return (torch.sigmoid(logits.to(self.residual.dtype)) - self.residual).clamp_(0.0, 1.0)

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """−ln P / L [B], differentiable by the logits."""
        classes = logits.shape[1]
        return WithGradient.apply(logits, self.surprise / classes, self.residual / classes)


def fixed(logits: torch.Tensor, labels: torch.Tensor) -> Likelihood:
    """For logits [B, L] and ternary labels int8 [B, L]; rows may differ in the number of shown positives."""
    return _in_blocks(logits, labels, min(logits.shape[1], LARGEST) * NODES, _fixed_rows)


def independent(logits: torch.Tensor, labels: torch.Tensor, q: torch.Tensor) -> Likelihood:
    """The same where positives are shown with probability q in (0, 1), a scalar or [L]."""
    q = q.to(logits.device, torch.promote_types(logits.dtype, torch.float32)).expand(logits.shape[1])

    def rows(logits: torch.Tensor, labels: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        p, positives, unknowns, surprise = _known_entries(logits, labels, residual)
        shown = q * p.mul(unknowns)
        # p − p(1 − q) / (1 − q p), written so that nothing cancels
        residual.addcdiv_(shown * torch.sigmoid(-logits), 1 - shown)
        return surprise - torch.log1p(-shown).sum(1) - positives @ torch.log(q)

    return _in_blocks(logits, labels, 0, rows)


def _in_blocks(logits: torch.Tensor, labels: torch.Tensor, width: int, rows_likelihood) -> Likelihood:
    with torch.no_grad():
        logits = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        surprise, residual = torch.empty_like(logits[:, 0]), torch.empty_like(logits)
        for rows in cached_blocks(logits, width):
            surprise[rows] = rows_likelihood(logits[rows], labels[rows], residual[rows])
        return Likelihood(surprise, residual)


def _fixed_rows(logits: torch.Tensor, labels: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    p, positives, unknowns, surprise = _known_entries(logits, labels, residual)
    hidden = Hidden.of(p.mul_(unknowns))
    shown = positives.sum(1, keepdim=True)
    told = shown.clamp(max=1.0)
    pull = positives  # its memory, needed no more
    integral = integrate(hidden, shown.clamp(min=1.0), pull)
    # p − E[y] of unknown entries = p (1 − p) · pull
    residual.add_(pull.mul_(torch.addcmul(p, p, p, value=-1.0, out=unknowns)).mul_(told))
    return surprise - told[:, 0] * integral


def _known_entries(logits: torch.Tensor, labels: torch.Tensor,
                   residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(p, 0/1 of shown positives, 0/1 of unknown entries, −ln P of known entries [B]); fills in their residuals."""
    positives, unknowns = numbers(positive(labels), logits), numbers(unknown(labels), logits)
    p = torch.sigmoid(logits)
    known = 1 - unknowns
    torch.mul(torch.sub(p, positives, out=residual), known, out=residual)
    against = torch.addcmul(logits, positives, logits, value=-2.0)  # −a of positives, a of the others
    return p, positives, unknowns, F.softplus(against).mul_(known).sum(1)
