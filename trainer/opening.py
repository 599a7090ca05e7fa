"""The first lines of a launch: what is trained on what, how, for how long, and where it goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lacuna.data_pipelines.source import ShardSource
    from lacuna.trainer.whole_run import Run


def opening(run: Run) -> list[str]:
    config, train = run.config, run.sources["train"]
    others = ", ".join(f"{name} {int(run.sources[name].counts.sum()):,}" for name in ("val", "test", "held_out")
                       if name in run.sources).replace("held_out", "held out")
    k = run.method.task.expected_positives
    known = f"k = {k:.2f} positives per {train.index.kind}" if k else "k not given (model.expected_positives)"
    phases = ", ".join(f"{phase.name} {phase.epochs} × {steps // phase.epochs:,}"
                       for phase, steps in zip(config.phases, run.steps, strict=True))
    ranks = "1 rank" if run.world.size == 1 else f"{run.world.size} ranks"
    return [
        f"data: {_samples(train)} of {train.classes:,} classes in {train.index.url}, labels {train.sidecar.name!r} "
        f"({_annotated(run)}); {others or 'no val, no test'}",
        f"method: {config.method['name']}, {known}; model: {config.model.backbone}, weights {config.model.weights}",
        f"run: {config.folder} on {ranks} ({run.world.device.type}), {sum(run.steps):,} steps ({phases})",
    ]


def _samples(source: ShardSource) -> str:
    subset = f" (subset {source.subset.name!r})" if source.subset else ""
    return f"{int(source.counts.sum()):,} {source.index.kind}s{subset}"


def _annotated(run: Run) -> str:
    task = run.method.task
    if task.fully_annotated:
        return "all classes known"
    each = f"{task.positives.sum() / max(1, task.samples):.2f} positives"
    return each + (f" and {task.negatives.sum() / max(1, task.samples):.2f} negatives" if task.negatives.sum() else "")
