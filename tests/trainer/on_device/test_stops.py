"""A run on an accelerator that is told to stop in the middle of an epoch waits for the rows on their way: its
checkpoint holds what the host's holds at that step, bit for bit, and going on ends equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers import launching, pretended_device
from tests.helpers.method_runs import config, make_data

SCRIPT = str(Path(launching.__file__).parent / "pretended_stops.py")
# name → (method, its settings)
RUNS: dict[str, tuple[str, dict]] = {
    "en_cl": ("en_cl", {}), "en_scl-topk": ("en_scl", {"top_k": 3}), "role": ("role", {}),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, dict]:
    """By device, then by run."""
    folder, found = tmp_path_factory.mktemp("stops"), {}
    make_data(folder)
    for device in (pretended_device.NAME, "cpu"):
        bodies = []
        for name, (method, settings) in RUNS.items():
            body = config(folder, method)
            body["name"], body["run_folder"] = name, str(folder / device)
            body["method"] |= settings
            bodies.append(body)
        jobs, out = folder / f"{device}.json", folder / f"{device}-found.json"
        jobs.write_text(json.dumps(bodies))
        launch = launching.launches.Launch(launching.command(1, str(jobs), str(out), device, script=SCRIPT),
                                           str(folder / f"{device}.out"), launching.environment(), str(folder))
        assert launch.wait(1800) == 0, launch.text()[-5000:]
        found[device] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("name", RUNS)
def test_a_stop_waits_for_the_rows_on_their_way(found, name):
    device, host = (found[kind][name] for kind in (pretended_device.NAME, "cpu"))
    assert "failed" not in device, device["failed"]
    assert "failed" not in host, host["failed"]
    assert device["middle"]["position"] == 5, "the step after the signal's, inside the second epoch"
    assert device["middle"]["rows"], "rows are stored"
    assert device["middle"] == host["middle"]
    assert device["end"]["position"] == 6
    assert device["end"] == host["end"]
    assert device["end"]["rows"] != device["middle"]["rows"]
