"""Proves with the real packages, offline: a killed and resumed run is one run of W&B and MLflow, every step once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from lacuna.basics.places import RUN_SCRIPT
from lacuna.tools.launches import Launch
from tests.helpers.launching import environment, metrics
from tests.helpers.own_venv import own_venv
from tests.helpers.run_configs import config

pytestmark = pytest.mark.long

# Run in the venv of the services. A .wandb file is a LevelDB log: 7 bytes, then blocks of 32 KB with parts of records.
READ = r'''
import glob, json, struct, sys
from mlflow.tracking import MlflowClient
from wandb.proto import wandb_internal_pb2 as messages

def records(path):
    data, at, part = open(path, "rb").read(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<xxxxHB", data, at)
        part, at = part + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            record = messages.Record()
            record.ParseFromString(part)
            part = b""
            yield record

launches, names = [], set()
for path in sorted(glob.glob("wandb/offline-run-*/*.wandb")):
    rows = []
    for record in records(path):
        if record.WhichOneof("record_type") == "run":
            names.add(record.run.run_id)
        if record.WhichOneof("record_type") == "history":
            rows.append({(item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item})
    launches.append(rows)
client = MlflowClient("sqlite:///mlflow.db")
runs = client.search_runs([client.get_experiment_by_name("lacuna").experiment_id])
shown = {key: [(m.step, m.value) for m in client.get_metric_history(runs[0].info.run_id, key)]
         for key in ("train/loss", "epoch/loss", "result/map")}
print(json.dumps({"wandb": launches, "ids": sorted(names), "runs": len(runs), "status": runs[0].info.status,
                  "lr": runs[0].data.params["phases.0.lr"], "mlflow": shown}))
'''


@pytest.fixture(scope="module")
def services() -> Path:
    return own_venv("loggers", "wandb", "mlflow-skinny", "sqlalchemy", "alembic", on_top=True)


def launch(python: Path, folder: Path, body: dict, number: int, **variables: str) -> Launch:
    path = folder / f"{body['name']}.yaml"
    path.write_text(yaml.safe_dump({"run_folder": str(folder), **body}))
    # A CI that is logged in, or tells where to send to, is none of this test's business.
    foreign = {name: "" for name in os.environ if name.startswith(("WANDB_", "MLFLOW_"))}
    variables = environment(**foreign, WANDB_MODE="offline", **variables)
    return Launch([str(python), RUN_SCRIPT, "--config", str(path)], str(folder / f"{number}.out"), variables,
                  str(folder))


def test_a_resumed_run_is_one_run_of_the_services(services, single_shards, tmp_path):
    body = config(single_shards, "logged")
    body["phases"] = body["phases"][1:]
    body["train"]["loggers"] = ["wandb", "mlflow"]
    first = launch(services, tmp_path, body, 1)
    folder = tmp_path / "logged"
    first.wait_until(lambda: any(line["step"] >= 8 for line in metrics(folder)), "step 8")  # a checkpoint is at 5
    first.signal_all(signal.SIGKILL)
    first.wait()
    second = launch(services, tmp_path, body, 2)
    assert second.wait() == 0, second.text()[-5000:]
    assert not (folder / "tensorboard").exists()

    done = subprocess.run([str(services), "-c", READ], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    expected = {line["step"]: line["loss"] for line in metrics(folder, "train")}
    assert (len(found["ids"]), found["runs"], found["status"], found["lr"]) == (1, 1, "FINISHED", "0.001")
    assert sorted(map(tuple, found["mlflow"]["train/loss"])) == sorted(expected.items())
    assert [step for step, _ in found["mlflow"]["epoch/loss"]] == [line["step"] for line in metrics(folder, "epoch")]
    assert len(found["mlflow"]["result/map"]) == 1
    assert len(found["wandb"]) == 2
    # What a killed launch had not written yet is caught up by the next one: offline, its folder holds the whole run.
    assert [(row["_step"], row["train/loss"]) for row in found["wandb"][1]] == sorted(expected.items())
    assert "epoch/val_map" in found["wandb"][1][-1]
    assert "result/map" in found["wandb"][1][-1]


def test_a_service_that_cannot_be_reached_is_said_before_training(services, single_shards, tmp_path):
    body = config(single_shards, "alone")
    body["train"]["loggers"] = ["mlflow"]
    refused = launch(services, tmp_path, body, 1, MLFLOW_TRACKING_URI="http://127.0.0.1:9",
                     MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
    assert refused.wait() == 2
    assert "train.loggers: MLflow does not begin a run" in refused.text()
    assert "MLFLOW_TRACKING_URI (http://127.0.0.1:9)" in refused.text()
    assert "Traceback" not in refused.text()
