"""Every file of a run's state and checkpoints is damaged one after another, and the run launched again.

`damaged_runs.py FOLDER all|some`: writes FOLDER/outcomes.json, a list of {"file", "harm", "equal", "said", "error",
"advised"}: `advised` is whether doing what the error says led to the same end.
`some` takes the newest file of every kind, and the metadata and tensors of the best epoch's checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from lacuna.basics.errors import UserError
from tests.helpers.small_runs import STEPS, Trainer, body, make_data, outcome

HARMS = {"truncated": lambda data: data[: len(data) // 2], "deleted": None,
         "flipped": lambda data: data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1:]}


def main(folder: Path, which: str) -> None:
    make_data(folder)
    trainer = Trainer()
    trainer.train(body(folder, "undisturbed"))
    expected = outcome(folder / "undisturbed")
    run, kept = folder / "run", folder / "kept"
    trainer.train(body(folder, "run"), leave=STEPS - 2)
    shutil.copytree(run, kept)
    found = []
    cases = [([file], harm) for file in chosen(kept, which) for harm in HARMS]
    for files, harm in [*cases, (both_of_best(kept), "deleted")]:
        shutil.rmtree(run)
        shutil.copytree(kept, run)
        for file in files:
            damage(run / file, HARMS[harm])
        one = {"file": " and ".join(files), "harm": harm, "equal": False, "said": [], "error": ""}
        try:
            trainer.train(body(folder, "run"))
            said = (run / "log.txt").read_text()[len((kept / "log.txt").read_text()):].splitlines()
            one |= {"equal": outcome(run) == expected,
                    "said": [line for line in said if "mended" in line or "torn" in line]}
        except UserError as problem:
            followed = follow(str(problem), run, lambda: trainer.train(body(folder, "run")))
            one |= {"error": str(problem), "advised": followed and outcome(run) == expected}
        found.append(one)
    (folder / "outcomes.json").write_text(json.dumps(found))


def follow(message: str, run: Path, train: Callable[[], None]) -> bool:
    """Do what the message says."""
    if f"remove {run} to start again" not in message:
        return False
    shutil.rmtree(run)
    train()
    return True


def damage(path: Path, change) -> None:
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))


def both_of_best(run: Path) -> list[str]:
    """The best epoch's weights and their spare copy: together they cannot be had again."""
    spare = next((run / "checkpoints" / "spare").glob("*/model.safetensors")).relative_to(run)
    return [str(spare), str(spare).replace("/spare/", "/")]


def chosen(run: Path, which: str) -> list[str]:
    """Everything but the chunks, whose damage is met when they are read."""
    files = sorted(str(path.relative_to(run)) for part in ("state", "checkpoints") for path in (run / part).rglob("*")
                   if path.is_file() and "/chunks/" not in str(path))
    if which == "all":
        return files
    kinds = {re.sub(r"\d[\w-]*", "#", name): name for name in files}  # the last of each kind stays
    best = min(name for name in files if name.endswith("COMMIT.json"))
    copy = json.loads((run / best).with_name("snapshot.json").read_text())
    beside = [name for name in files if os.path.dirname(name) == os.path.dirname(best)]
    tensors = [name for name in beside if name.endswith(".safetensors")]
    return sorted({*kinds.values(), best, f"state/manifests/{copy['manifest']}.json", *tensors})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
    sys.stdout.flush()
    os._exit(0)
