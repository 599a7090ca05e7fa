"""The first screen: what was trained, how good it is, how much of the gap is closed, which classes gained and lost."""

from __future__ import annotations

from typing import Any

from lacuna.data_pipelines.labels import NEGATIVE
from lacuna.tools.report.recorded_run import RecordedRun
from lacuna.trainer.held_out import describe

_CLASSES = 5


def headline(folders: list[RecordedRun], oracle: RecordedRun | None, data: dict[str, Any]) -> dict[str, Any]:
    """`data` is what the page says elsewhere; the headline repeats its numbers and computes none that is not there."""
    paths = [folder.path for folder in folders]
    ceiling = paths.index(oracle.path) if oracle else None
    baseline = next((i for i, run in enumerate(data["runs"]) if data["gap"] and run["name"] == data["gap"]["baseline"]),
                    0)
    subject = _subject(data["runs"], {ceiling, baseline})
    run = data["runs"][subject]
    split = next((name for name in ("test", "val") if run["scores"][name] is not None), None)
    return {"run": run["name"], "method": run["method"], "trained": _trained(folders[subject], run),
            "split": split, "score": run["scores"][split] if split else None,
            "said": [] if split else _without_a_score(run, folders[subject]),
            "gap": _gap(data["gap"], baseline, ceiling), "pictures": (run["beliefs"] or {}).pop("pictures", []),
            "classes": _classes(data["classes"], subject, baseline)}


def _subject(runs: list[dict], others: set[int | None]) -> int:
    """The run that the headline is about: the best by validation besides baseline and ceiling, else the first."""
    own = [i for i in range(len(runs)) if i not in others] or [0]
    return max(own, key=lambda i: (runs[i]["scores"]["val"] is not None, runs[i]["scores"]["val"] or 0.0, -i))


def _trained(folder: RecordedRun, run: dict) -> list[str]:
    config, source = folder.config, folder.train
    lines = []
    if source is not None:
        kind = "images" if source.index.kind == "image" else "feature vectors"
        lines.append(f"{run['samples']:,} {kind}, {source.classes:,} classes")
        sidecar, samples = source.sidecar, max(1, source.index.samples)
        known = (sidecar.positives.sum() + sidecar.negatives.sum()) / samples
        lines.append("every label known" if sidecar.unlisted == NEGATIVE else
                     f"{known:.3g} of {source.classes:,} labels known per sample "
                     f"({sidecar.positives.sum() / samples:.3g} positive)")
    epochs = sum(phase.epochs for phase in config.phases)
    lines.append(f"{config.model.backbone}, {epochs} epochs, {run['steps']:,} steps")
    return lines


def _without_a_score(run: dict, folder: RecordedRun) -> list[str]:
    """What can be said about a run that nobody has measured."""
    said = ["There is no mAP: the run has no validation set and no test set, or has not come so far. Give one with "
            "data.val.url, or measure it with `lacuna eval`."]
    known = folder.results.get("held_out")
    if isinstance(known, dict) and folder.train is not None:
        index = folder.train.index
        text = describe(known, index.kind, len(index.classes))
        said += [f"{text[0].upper()}{text[1:]}."] if text else []
        said.append(f"To know more, label 100 images: `lacuna select {folder.path} --budget 100` chooses questions, "
                    f"`lacuna explore {folder.path}` takes the answers.")
    loss = [point for point in run["curves"].get("loss", []) if point[1] is not None]
    if len(loss) > 1:
        said.append(f"Its training loss went from {loss[0][1]:.4g} (step {loss[0][0]:,}) to {loss[-1][1]:.4g} "
                    f"(step {loss[-1][0]:,}).")
    if run["beliefs"]:
        last = run["beliefs"]["moments"][-1]
        said.append(f"Of {last['samples']:,} training samples it is at least 90 % sure of {last['sure']:,} labels that "
                    f"nobody gave. It expects {last['expected']:.2f} positives per sample; {last['given']:.2f} are "
                    "annotated.")
        if last.get("recovery_unobserved") is not None:
            said.append(f"Against the true labels, its beliefs about them reach {last['recovery_unobserved']:.1f} mAP.")
    return said


def _gap(gap: dict | None, baseline: int, ceiling: int | None) -> dict[str, Any] | None:
    if gap is None or ceiling is None:
        return None
    rows = gap["rows"]
    return {"split": gap["split"], "low": rows[baseline], "high": rows[ceiling],
            "rows": [row for i, row in enumerate(rows) if i not in (baseline, ceiling)]}


def _classes(table: dict, subject: int, baseline: int) -> dict[str, Any]:
    """Gained and lost against the baseline; of a run alone, its best and worst classes."""
    against = baseline if baseline != subject else None
    found = []
    for row in table["rows"]:
        ap, before = row["ap"][subject], None if against is None else row["ap"][against]
        if ap is not None and (against is None or before is not None):
            found.append({"name": row["name"], "ap": ap, "change": None if before is None else ap - before})
    found.sort(key=lambda c: -(c["ap"] if against is None else c["change"]))
    up, down = found[:_CLASSES], found[::-1][:_CLASSES]
    if against is not None:
        up, down = [c for c in up if c["change"] > 0], [c for c in down if c["change"] < 0]
    else:
        down = [c for c in down if c not in up]
    return {"against": None if against is None else table["runs"][against], "split": table["split"], "up": up,
            "down": down}
