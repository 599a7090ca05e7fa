"""The loop: batch → state → forward → loss → step → state → log → checkpoint."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lacuna.basics.errors import UserError
from lacuna.basics.hashing import mix
from lacuna.data_pipelines.batch import Batch
from lacuna.trainer.checkpoints.checkpoint import Position
from lacuna.trainer.config.durations import to_steps
from lacuna.trainer.engine import set_lr
from lacuna.trainer.methods.base import Step
from lacuna.trainer.pace import Pace
from lacuna.trainer.schedules import lr_factor

if TYPE_CHECKING:
    from lacuna.trainer.phase import Phase


def train_epoch(phase: Phase, position: Position) -> Position:
    """From the given step to the end of the epoch, or to the stop; the position reached."""
    run, plan = phase.run, phase.plans[position.epoch]
    every = to_steps(run.config.train.checkpoint_every, plan.steps, phase.total)
    run.run_log.begin_epoch(f"{phase.config.name} epoch {position.epoch + 1}/{phase.config.epochs}", plan.steps,
                            position.step, phase.steps_after(position.epoch))
    run.model.train()
    run.state.begin_epoch(plan, position.step, phase.epochs_before + position.epoch)
    pace = Pace()
    with phase.stream(plan, position) as stream, phase.fully_labelled.epoch(position):
        batches = iter(stream)
        for step in range(position.step, plan.steps):
            batch = pace.waiting_for(batches)
            samples, stop = take_step(phase, batch, position)
            pace.samples += samples
            position = position.advanced(step=step + 1, total_steps=position.total_steps + 1)
            run.watchdog.beat(f"{phase.config.name} epoch {position.epoch + 1} step {step + 1}")
            due = position.total_steps % run.config.train.log_every == 0
            run.run_log.meter.tick()
            run.run_log.progress(log_line(phase, position, pace) if due else "", due)
            last = step + 1 == plan.steps  # the epoch's own checkpoint follows
            if (stop or (phase.steps_before[position.epoch] + step + 1) % every == 0) and not last:
                phase.save(position)
            if stop and not last:
                run.stop.agreed = True
                break
    run.run_log.end_epoch()
    return position


def take_step(phase: Phase, batch: Batch, position: Position) -> tuple[int, bool]:
    """One optimizer step; (samples of the global batch, whether any rank was asked to stop)."""
    run, world = phase.run, phase.run.world
    world.seed(mix(run.config.seed, position.total_steps, world.rank))  # dropout, the same after a resume
    counted, stop, bad = world.sum_counts(len(batch), run.stop.asked, len(batch.bad))
    _note_bad(phase, batch, int(bad), position)
    if run.config.train.trace_samples:
        run.run_log.trace(position.total_steps + 1, batch.shards.tolist(), batch.rows.tolist())
    done = phase.steps_before[position.epoch] + position.step
    set_lr(phase.engine, phase.base_lr, lr_factor(phase.config.schedule, done, phase.total, phase.warmup))
    with run.state.step(batch) as rows:
        step = Step(world, max(1, int(counted)), position.epoch, phase.config.epochs, phase.number, done, rows,
                    phase.learner.forward)
        batch = phase.mixer.apply(batch, phase.plans[position.epoch])
        loss, metrics = phase.learner.learn(batch, step, position.total_steps, phase.fully_labelled.take())
    phase.sums.add(loss, metrics)
    phase.average_weights()
    return int(counted), bool(stop)


def log_line(phase: Phase, position: Position, pace: Pace) -> str:
    """One line of metrics.jsonl, and the same in short for people."""
    run = phase.run
    loss, means = phase.sums.interval(run.world)
    lr = phase.engine.optimizer.param_groups[0]["lr"]
    speed = pace.samples_per_second()
    run.run_log.write("train", position.total_steps, {
        "phase": phase.config.name, "epoch": position.epoch, "loss": loss, "lr": lr,
        "samples_per_second": speed, "data_wait_seconds": pace.waited, **means,
        **run.state.metrics(),
    })
    pace.restart()
    if not math.isfinite(loss):
        raise UserError(f"the loss is {loss} at step {position.total_steps}: lower the lr of phase "
                        f"{phase.config.name!r} or set train.clip_norm.")
    kind = run.sources["train"].index.kind
    return (f"{phase.config.name} epoch {position.epoch + 1}/{phase.config.epochs} "
            f"step {position.step}/{phase.plans[position.epoch].steps} loss {loss:.4f} lr {lr:.2e}, "
            f"{speed:,.0f} {kind}s/s, {run.run_log.meter.text()}")


def _note_bad(phase: Phase, batch: Batch, bad_everywhere: int, position: Position) -> None:
    """List corrupt samples; too many end the run."""
    if bad_everywhere == 0:
        return
    run = phase.run
    found = [{"step": position.total_steps, **vars(b)} for rank in run.world.gather(batch.bad) for b in rank]
    run.run_log.write_bad_samples(found)
    phase.sums.bad_samples += bad_everywhere
    allowed = run.config.data.max_bad_fraction * float(phase.plans[position.epoch].stream_samples.sum())
    if phase.sums.bad_samples > allowed:
        first = found[0]
        raise UserError(
            f"{phase.sums.bad_samples} samples of this epoch could not be decoded, more than "
            f"data.max_bad_fraction = {run.config.data.max_bad_fraction} allows; the last: {first['key']!r} in "
            f"{first['shard']} ({first['reason']}). All are listed in {run.config.folder}/bad_samples.jsonl; "
            "repair them (`lacuna shards check` finds them all) or raise data.max_bad_fraction."
        )
