"""Proves that one damaged file of a run costs at most one checkpoint, and that following advice leads to a run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lacuna import state_store
from lacuna.state_store.verify import verify
from lacuna.tools.cli import main
from tests.helpers.launching import ROOT, environment

HARMS = ("truncated", "deleted", "flipped")
METADATA = ("state/log/", "state/manifests/", "state/zarr.json", "state/schema.json", "state/score/zarr.json",
            "state/histograms/", "state/claims/", "COMMIT.json", "snapshot.json")


def damaged_runs(folder: Path, *arguments: str) -> list[dict]:
    script = str(ROOT / "tests" / "helpers" / "damaged_runs.py")
    done = subprocess.run([sys.executable, script, str(folder), *arguments], env=environment(OMP_NUM_THREADS="1"),
                          capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "outcomes.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damage")


@pytest.fixture(scope="module")
def outcomes(folder):
    return damaged_runs(folder, "some")


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("part", METADATA)
def test_metadata(outcomes, part, harm):
    """The next launch goes on by itself, at most one checkpoint earlier, and ends as the undisturbed run."""
    mine = [o for o in outcomes if part in o["file"] and o["harm"] == harm]
    assert mine
    for o in mine:
        assert o["equal"], o
        assert len([line for line in o["said"] if " is torn " in line]) <= 1, o
        if part not in ("state/claims/", "state/histograms/") and (part, harm) != ("state/log/", "deleted"):
            assert o["said"], o


@pytest.mark.parametrize("harm", HARMS)
def test_tensors(outcomes, harm):
    """A damaged file of the newest checkpoint's tensors is named, and the checkpoint before it taken; one of the best
    epoch's is brought back from its spare copy, and a damaged spare costs nothing."""
    mine = [o for o in outcomes[:-1] if o["file"].endswith((".safetensors", ".pt")) and o["harm"] == harm]
    assert len(mine) >= 7
    best = [o for o in mine if "step-00000004/" in o["file"]]
    assert len(best) == 4, "two files and their spare copies"
    for o in mine:
        assert o["equal"], o
        if o["file"].startswith("checkpoints/spare/"):
            continue
        assert o["file"].partition("/step-")[2].partition("/")[2] in o["said"][0], o
        if o in best:
            assert o["said"][0].endswith("from its spare copy"), o


def test_what_cannot_be_had_again_is_said_and_following_the_advice_leads_to_a_run(outcomes):
    lost = outcomes[-1]
    assert lost["file"] == ("checkpoints/spare/step-00000004/model.safetensors and "
                            "checkpoints/step-00000004/model.safetensors")
    assert "no whole one is left. Restore it, or remove" in lost["error"]
    assert lost["advised"]


@pytest.mark.long
def test_every_file(tmp_path):
    """Every file, the older checkpoints' and the best epoch's too."""
    outcomes = damaged_runs(tmp_path, "all")
    assert len(outcomes) > 60
    assert [o for o in outcomes[:-1] if not o["equal"]] == []


def test_repair_by_hand(outcomes, folder, capsys):
    """`lacuna state verify --repair` mends what the next launch would; without it, only says so."""
    run = folder / "by-hand"
    shutil.copytree(folder / "kept", run)
    store = state_store.open(str(run / "state"))
    last = store.snapshots()[-1]
    (run / "state" / "log" / f"{last.number:08d}.json").write_text("{}")
    (run / "state" / "manifests" / f"{last.manifest}.json").unlink()
    (run / "state" / "zarr.json").write_text("")
    (run / "checkpoints" / last.name / "COMMIT.json").unlink()
    assert main(["state", "verify", str(run / "state")]) == 1
    assert "verify --repair" in capsys.readouterr().out
    assert main(["state", "verify", str(run / "state"), "--repair"]) == 0
    said = capsys.readouterr().out
    for what in ("COMMIT.json, from the log", "zarr.json, from its copy", f"manifest of snapshot {last.name}",
                 f"log entry of snapshot {last.name}", "unreadable log entry"):
        assert what in said
    mended = state_store.open(str(run / "state"))
    assert mended.snapshots()[-1].manifest == last.manifest
    assert verify(mended).problems == []
    assert main(["state", "verify", str(run / "state"), "--repair", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mended"] == []
