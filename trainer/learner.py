"""What one global batch does to the weights and the state: forward, loss, backward, step, new rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lacuna.basics.hashing import mix
from lacuna.data_pipelines.batch import Batch
from lacuna.trainer.accumulate import carried, check_two_forwards, gather_outputs
from lacuna.trainer.alone import Alone
from lacuna.trainer.engine import BatchSplit
from lacuna.trainer.evaluate import autocast, model_inputs
from lacuna.trainer.fully_labelled import Further
from lacuna.trainer.methods.base import LossTerms, Outputs, Step
from lacuna.trainer.on_device.uploads import beside

if TYPE_CHECKING:
    from lacuna.trainer.whole_run import Run


class Learner:
    """Of one phase. A rank's share is cut into micro-batches; a loss with a batch-coupled term sees them as one."""

    def __init__(self, run: Run, engine, split: BatchSplit, pull: torch.Tensor | None = None):
        """`pull`: λ·W₀, where the head's decay is towards W₀ (head_decay.py)."""
        self.run, self.split, self.pull = run, split, pull
        self.engine = Alone(engine) if Alone.suits(run.config, run.world) else engine
        self.two_forwards = run.method.needs().whole_batch and split.pieces > 1
        needs = run.method.needs()
        self.with_maps, self.of_classes = needs.maps, needs.class_features
        if self.two_forwards:
            check_two_forwards(run.method, run.config.method["name"], run.model, run.config.train.micro_batch)

    def learn(self, batch: Batch, step: Step, total_steps: int,
              further: Further | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """One optimizer step: (this rank's part of the global loss, values [B] that the method reports)."""
        batch.moved_from, batch.labels = batch.labels, beside(batch.labels, self.run.world.device)
        shares: list[torch.Tensor] = []  # what every piece adds to the loss
        added: list[torch.Tensor] = []  # and what the further samples of every piece add
        terms = ([self._learn_whole(batch, step, total_steps, further, shares, added)] if self.two_forwards
                 else self._learn_pieces(batch, step, further, shares, added))
        metrics = {name: torch.cat([part.metrics[name] for part in terms]) for name in terms[0].metrics}
        parts = [share.detach() for share in shares + added]
        total = parts[0].double() if len(parts) == 1 else torch.stack(parts).sum(dtype=torch.float64)
        return total, metrics

    def _learn_pieces(self, batch: Batch, step: Step, further: Further | None, shares: list[torch.Tensor],
                      added: list[torch.Tensor]) -> list[LossTerms]:
        """Forward, loss and backward of one micro-batch after the other."""
        run, found = self.run, []
        for piece in range(self.split.pieces):
            micro, part = self._piece(batch, step, piece)
            terms = self._terms(self.forward(micro.inputs), micro, part)
            part.state.write(terms.rows)  # they travel while the backward runs
            shares.append(self._share(terms, step))
            # DeepSpeed averages gradients over ranks and pieces; the global loss is a sum of shares.
            parts = self.split.pieces * run.world.size
            loss = shares[-1] if parts == 1 else parts * shares[-1]
            self.engine.backward(self._with_further(loss, piece, further, added))
            self.engine.step()
            found.append(terms)
        return found

    def _piece(self, batch: Batch, step: Step, piece: int) -> tuple[Batch, Step]:
        if self.split.pieces == 1:
            return batch, step
        start, stop = piece * self.split.micro, (piece + 1) * self.split.micro
        return batch.narrow(start, stop), replace(step, state=step.state.narrow(start, stop))

    def _learn_whole(self, batch: Batch, step: Step, total_steps: int, further: Further | None,
                     shares: list[torch.Tensor], added: list[torch.Tensor]) -> LossTerms:
        """The loss of this rank's whole share at once, its gradient carried into the weights piece by piece."""
        run, micro = self.run, self.split.micro
        pieces = [batch.inputs[piece * micro : (piece + 1) * micro] for piece in range(self.split.pieces)]
        seeds = [mix(run.config.seed, total_steps, run.world.rank, piece) for piece in range(len(pieces))]
        gathered = gather_outputs(pieces, self.forward, seeds)
        terms = run.method.loss(gathered.outputs, batch, step)
        step.state.write(terms.rows)
        shares.append(self._share(terms, step))
        (run.world.size * shares[-1]).backward()
        for piece, (inputs, seed, gradients) in enumerate(zip(pieces, seeds, gathered.gradients(), strict=True)):
            torch.manual_seed(seed)
            loss = len(pieces) * carried(self.forward(inputs), gradients)
            self.engine.backward(self._with_further(loss, piece, further, added))
            self.engine.step()
        return terms

    def _terms(self, outputs: Outputs, batch: Batch, step: Step) -> LossTerms:
        """The method's loss; of mixed images that with either labels, by their shares (mixing.py)."""
        terms = self.run.method.loss(outputs, batch, step)
        if batch.other_labels is None or batch.shares is None:
            return terms
        labels = batch.other_labels
        other = self.run.method.loss(outputs, replace(batch, labels=beside(labels, self.run.world.device),
                                                      moved_from=labels), step)
        shares = beside(batch.shares, self.run.world.device)
        return replace(terms, per_sample=shares * terms.per_sample + (1 - shares) * other.per_sample)

    def _with_further(self, loss: torch.Tensor, piece: int, further: Further | None,
                      added: list[torch.Tensor]) -> torch.Tensor:
        """A piece's loss with that of its further samples, whose share is noted, and with the head's pull, which is the
        same on every rank and in every piece: DeepSpeed's mean over both leaves it as it is."""
        if self.pull is not None:
            loss = loss - (self.run.model.head.get_parameter("weight") * self.pull).sum()
        if further is None:
            return loss
        part = further.narrow(piece, self.split.pieces)
        outputs = self.forward(part.batch.inputs)
        labels = beside(part.batch.labels, self.run.world.device)
        added.append(part.share(self.run.method.complete_loss(outputs.logits, labels)))
        return loss + self.split.pieces * self.run.world.size * added[-1]

    def _share(self, terms: LossTerms, step: Step) -> torch.Tensor:
        """This rank's part of the global loss; a batch-coupled term, equal on every rank, in equal parts."""
        share = terms.per_sample.sum() / step.samples
        return share if terms.coupled is None else share + terms.coupled / self.run.world.size

    def forward(self, inputs: torch.Tensor, **look) -> Outputs:
        """Outputs of a micro-batch; an empty one costs a dummy forward, so that every rank takes part in the step."""
        run = self.run
        count = len(inputs)
        empty = count == 0
        synced = run.config.model.batchnorm == "sync"  # its statistics are a collective: an empty rank takes part too
        if empty and not synced:
            inputs = inputs.new_zeros((1, *inputs.shape[1:]))
            look = {key: value.new_zeros((1, *value.shape[1:])) if isinstance(value, torch.Tensor) else value
                    for key, value in look.items()}
        # BatchNorm must not see the dummy, and local statistics of a single sample may not exist.
        apart = not synced and (empty or (count == 1 and run.config.model.batchnorm == "local"))
        if apart:
            run.model.eval()
        with autocast(run.config, run.world):
            inputs = model_inputs(inputs, run.config, run.world)
            logits, maps, features = self.engine(inputs, with_maps=self.with_maps, of_classes=self.of_classes, **look)
        if apart:
            run.model.train()
        return Outputs(logits[:count], None if maps is None else maps[:count], features[:count])
