"""One phase of training, with the loop: batch → state → forward → loss → step → state → log → checkpoint → evaluate."""

from __future__ import annotations

import copy
import itertools
import logging
import time
from typing import TYPE_CHECKING

import torch

from lacuna.basics.errors import UserError
from lacuna.basics.hashing import mix
from lacuna.data_pipelines.augment import Augment
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.stream import Batch, EpochStream, SampleMaker
from lacuna.trainer.checkpoints.checkpoint import Checkpoint, Position, load_engine, load_method_state, needs_conversion
from lacuna.trainer.config.durations import to_steps
from lacuna.trainer.config.sections import DataConfig
from lacuna.trainer.engine import BatchSplit, build_engine, set_lr, zero_stage
from lacuna.trainer.evaluate import describe, evaluate
from lacuna.trainer.learner import Learner
from lacuna.trainer.methods.base import EpochStart, Step
from lacuna.trainer.running_means import RunningMeans
from lacuna.trainer.schedules import lr_factor
from lacuna.trainer.scored_samples import scored

if TYPE_CHECKING:
    from lacuna.trainer.whole_run import Run

log = logging.getLogger("lacuna")


class Phase:
    """One optimisation stage: its engine, weight EMA and epoch plans."""

    def __init__(self, run: Run, number: int, checkpoint: Checkpoint | None):
        self.run, self.number, self.config = run, number, run.config.phases[number]
        world, train_config = run.world, run.config.train
        self.zero_stage = zero_stage(run.config, self.config)
        if checkpoint and checkpoint.zero_stage != self.zero_stage:
            raise UserError(f"train.deepspeed asks for ZeRO stage {self.zero_stage}, but {checkpoint.url} was "
                            f"written with stage {checkpoint.zero_stage}. Resume with that stage.")
        split = BatchSplit.of(self.config.batch, train_config.micro_batch, world.size)
        universal = checkpoint is not None and needs_conversion(checkpoint, world)
        if universal and checkpoint and self.config.optimizer == "sgd":
            raise UserError(f"{checkpoint.url} was written by {checkpoint.world} ranks with ZeRO stage "
                            f"{self.zero_stage} and SGD; DeepSpeed converts only Adam's state to other worlds. "
                            f"Resume with {checkpoint.world} ranks, or start runs that shall change with zero0.")
        self.engine, self.base_lr = build_engine(run.model, run.config, self.config, world, universal)
        self.learner = Learner(run, self.engine, split)
        self.ema = copy.deepcopy(run.model).eval() if train_config.ema_decay else None
        if checkpoint:
            load_engine(self.engine, checkpoint, world, run.checkpoints.folder.remote)
            run.method.load_state(load_method_state(checkpoint))
            if self.ema is not None:
                self.ema.load_state_dict(checkpoint.weights())
        source = run.sources["train"]
        self.plans = [EpochPlan(source.rows, mix(run.config.seed, number), epoch, run.config.data.streams,
                                self.config.batch, run.config.data.open_shards) for epoch in range(self.config.epochs)]
        self.steps_before = [0, *itertools.accumulate(plan.steps for plan in self.plans)]  # every epoch of the phase
        self.total = self.steps_before[-1]
        self.warmup = to_steps(self.config.warmup, self.plans[0].steps, self.total)
        if world.main and source.rows.sum() < 0.9 * self.config.batch * self.plans[0].steps:
            log.warning("phase %r: global batches hold %.0f samples on average, not %d, because data.streams = %d is "
                        "too many for %d shards; use fewer streams or make more shards", self.config.name,
                        source.rows.sum() / self.plans[0].steps, self.config.batch, run.config.data.streams,
                        len(source.index.shards))
        self._epochs_before = sum(phase.epochs for phase in run.config.phases[:number])
        # Loss of the reporting interval and of the epoch, bad samples of the epoch, steps of the interval.
        self.sums = torch.zeros(4, dtype=torch.float64, device=world.device)
        self.means = RunningMeans(world.device)

    def train(self, position: Position) -> Position:
        """From the given position to the end of the phase (or the stop); the position reached."""
        if position.epoch_sums:
            self._restore_sums(position)
        for epoch in range(position.epoch, self.config.epochs):
            if position.step == 0:
                self.run.method.begin_epoch(self.epoch_start(epoch))
                self.sums[1:3] = 0
                self.means.begin_epoch()
            position = self._train_epoch(position)
            if not self.run.stop.agreed:
                position = self._end_epoch(position)
            if self.run.stop.agreed:
                break
        return position

    def epoch_start(self, epoch: int) -> EpochStart:
        run, overall = self.run, self._epochs_before + epoch
        return EpochStart(self.number, epoch, self.config.epochs, overall, run.world, run.state,
                          lambda: scored(run, self.plans[epoch], overall))

    def _train_epoch(self, position: Position) -> Position:
        """The loop."""
        run, plan = self.run, self.plans[position.epoch]
        every = to_steps(run.config.train.checkpoint_every, plan.steps, self.total)
        run.run_log.begin_epoch(f"{self.config.name} epoch {position.epoch + 1}/{self.config.epochs}", plan.steps,
                                position.step)
        run.model.train()
        if run.state:
            run.state.begin_epoch(plan, position.step, self._epochs_before + position.epoch)
        started, waited, seen = time.monotonic(), 0.0, 0
        with self._stream(plan, position) as stream:
            batches = iter(stream)
            for step in range(position.step, plan.steps):
                before = time.monotonic()
                batch = next(batches)
                waited += time.monotonic() - before
                samples, stop = self._step(batch, position)
                seen += samples
                position = position.advanced(step=step + 1, total_steps=position.total_steps + 1)
                run.watchdog.beat(f"{self.config.name} epoch {position.epoch + 1} step {step + 1}")
                report = position.total_steps % run.config.train.log_every == 0
                text = self._report(position, seen, time.monotonic() - started, waited) if report else ""
                run.run_log.progress(text, report)
                if report:
                    started, waited, seen = time.monotonic(), 0.0, 0
                last = step + 1 == plan.steps
                if (stop or (self.steps_before[position.epoch] + step + 1) % every == 0) and not last:
                    self._save(position)
                if stop and not last:
                    run.stop.agreed = True
                    break
        run.run_log.end_epoch()
        return position

    def _stream(self, plan: EpochPlan, position: Position) -> EpochStream:
        run, data, world = self.run, self.run.config.data, self.run.world
        source = run.sources["train"]
        augment = train_augment(data) if source.index.kind == "image" else None
        strong = Augment(data.image_size, **data.strong_augment.model_dump()) if run.method.needs_strong_view else None
        maker = SampleMaker(augment, plan.seed, plan.epoch, source.feature_width, strong)
        return EpochStream(source, plan, plan.rank_streams(world.rank, world.size), maker, start_step=position.step,
                           workers=data.workers, prefetch=data.prefetch, pin=world.device.type == "cuda")

    def _step(self, batch: Batch, position: Position) -> tuple[int, bool]:
        """One optimizer step; (samples of the global batch, whether any rank was asked to stop)."""
        run, world = self.run, self.run.world
        world.seed(mix(run.config.seed, position.total_steps, world.rank))  # dropout, the same after a resume
        counted, stop, bad = world.sum_counts(len(batch), run.stop.asked, len(batch.bad))
        self._note_bad(batch, int(bad), position)
        if run.config.train.trace_samples:
            run.run_log.trace(position.total_steps + 1, batch.shards.tolist(), batch.rows.tolist())
        done = self.steps_before[position.epoch] + position.step
        set_lr(self.engine, self.base_lr, lr_factor(self.config.schedule, done, self.total, self.warmup))
        step = Step(world, max(1, int(counted)), position.epoch, self.config.epochs, self.number, done,
                    forward=self.learner.forward)
        if run.state:
            run.state.begin_step()
        loss, metrics = self.learner.learn(batch, step, position.total_steps)
        self.sums[:2] += loss
        self.sums[3] += 1
        self.means.add(metrics)
        if run.state:
            run.state.end_step()
        if self.ema is not None:
            update_ema(self.ema, run.model, run.config.train.ema_decay)
        return int(counted), bool(stop)

    def _note_bad(self, batch: Batch, bad_everywhere: int, position: Position) -> None:
        if bad_everywhere == 0:
            return
        run = self.run
        found = [{"step": position.total_steps, **vars(b)} for rank in run.world.gather(batch.bad) for b in rank]
        run.run_log.write_bad_samples(found)
        self.sums[2] += bad_everywhere
        allowed = run.config.data.max_bad_fraction * float(self.plans[position.epoch].stream_samples.sum())
        if self.sums[2].item() > allowed:
            first = found[0]
            raise UserError(
                f"{int(self.sums[2].item())} samples of this epoch could not be decoded, more than "
                f"data.max_bad_fraction = {run.config.data.max_bad_fraction} allows; the last: {first['key']!r} in "
                f"{first['shard']} ({first['reason']}). All are listed in {run.config.folder}/bad_samples.jsonl; "
                "repair them (`lacuna shards check` finds them all) or raise data.max_bad_fraction."
            )

    def _report(self, position: Position, seen: int, seconds: float, waited: float) -> str:
        loss = self.run.world.sum_counts(float(self.sums[0]))[0] / float(self.sums[3])
        self.sums[0] = self.sums[3] = 0
        lr = self.engine.optimizer.param_groups[0]["lr"]
        self.run.run_log.write("train", position.total_steps, {
            "phase": self.config.name, "epoch": position.epoch, "loss": loss, "lr": lr,
            "samples_per_second": seen / max(seconds, 1e-9), "data_wait_seconds": waited,
            **self.means.interval(self.run.world), **(self.run.state.metrics() if self.run.state else {}),
        })
        if not torch.isfinite(torch.tensor(loss)):
            raise UserError(f"the loss is {loss} at step {position.total_steps}: lower the lr of phase "
                            f"{self.config.name!r} or set train.clip_norm.")
        return f"{self.config.name} epoch {position.epoch + 1} step {position.step} loss {loss:.4f} lr {lr:.2e}"

    def _end_epoch(self, position: Position) -> Position:
        """Evaluate, remember the best, and write the epoch's checkpoint."""
        run = self.run
        if run.state:
            run.state.end_epoch()
        loss = run.world.sum_counts(float(self.sums[1]))[0] / max(1, self.plans[position.epoch].steps)
        values: dict = {"phase": self.config.name, "epoch": position.epoch, "loss": loss, "bad": int(self.sums[2]),
                        **self.means.epoch(run.world)}
        best = position.best_score
        last = position.epoch + 1 == self.config.epochs
        summary: dict = {}
        if "val" in run.sources and ((position.epoch + 1) % run.config.train.eval_every == 0 or last):
            if run.config.model.batchnorm == "local":
                run.world.share_buffers(run.model)  # the statistics that the checkpoint will hold
            result = evaluate(self.ema or run.model, run.sources["val"], run.config, run.world, run.watchdog, "val")
            summary = result.summary()
            values |= {f"val_{key}": value for key, value in summary.items()}
            if best is None or summary["map_skip_empty"] > best:
                position = position.advanced(best_score=summary["map_skip_empty"], best_step=position.total_steps)
                index = run.sources["val"].index
                run.run_log.write_classes("val", result, index.classes, index.class_ids)
        shown = ", val " + describe(summary) if summary else ""
        log.info("%s epoch %d/%d: loss %.4f%s", self.config.name, position.epoch + 1, self.config.epochs, loss, shown)
        run.run_log.write("epoch", position.total_steps, values)
        position = position.advanced(epoch=position.epoch + 1, step=0, epoch_sums={})
        self._save(position)
        run.stop.agreed = run.world.sum_counts(run.stop.asked)[0] > 0
        return position

    def _save(self, position: Position) -> None:
        parts = {f"{rank}": sums for rank, sums in enumerate(self.run.world.gather(
            self.sums.tolist() + self.means.to_list()))}
        if not torch.isfinite(torch.tensor(list(parts.values()))).all():
            raise UserError(f"the loss is not finite at step {position.total_steps}, so no checkpoint is written: "
                            f"lower the lr of phase {self.config.name!r} or set train.clip_norm, and start again.")
        position = position.advanced(epoch_sums=parts)
        self.run.checkpoints.save(self.engine, self.ema, self.run.method.state(), position, self.zero_stage,
                                  self.run.state)
        self.run.watchdog.beat("checkpoint")

    def _restore_sums(self, position: Position) -> None:
        """Each rank its own part; with another number of ranks, rank 0 takes the total."""
        parts, world = position.epoch_sums, self.run.world
        if len(parts) == world.size:
            mine = torch.tensor(parts[str(world.rank)], dtype=torch.float64)
        else:
            mine = torch.tensor(list(parts.values()), dtype=torch.float64).sum(0) * float(world.main)
        mine[2:4] = torch.tensor(parts["0"], dtype=torch.float64)[2:4]  # counts are the same on every rank
        self.sums.copy_(mine[:4])
        self.means.restore(mine[4:])

    def close(self) -> None:
        self.engine.destroy()


def train_augment(data: DataConfig) -> Augment:
    return Augment(data.image_size, **data.augment.model_dump())


def update_ema(ema: torch.nn.Module, model: torch.nn.Module, decay: float) -> None:
    with torch.no_grad():
        for average, weight in zip(ema.parameters(), model.parameters(), strict=True):
            average.lerp_(weight, 1 - decay)
        for copied, buffer in zip(ema.buffers(), model.buffers(), strict=True):
            copied.copy_(buffer)
