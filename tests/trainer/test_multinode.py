"""Two nodes (network namespaces joined by a veth pair) and 4 → 2 → 1 ranks: killed and relaunched, state and weights
are those of the uninterrupted run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from lacuna import state_store
from lacuna.basics.places import RUN_SCRIPT
from lacuna.tools import launches
from lacuna.tools.launches import timeless
from tests.helpers.launching import (
    ROOT,
    Launch,
    assert_equal_weights,
    environment,
    last_checkpoint,
    losses,
    metrics,
    stored,
    trace,
    weights,
)
from tests.helpers.run_configs import en_scl_config


class Nodes:
    """Two namespaces, each with one end of a cable; they share this machine's files, as nodes share storage."""

    def __init__(self) -> None:
        self.names = [f"lacuna-{os.getpid()}-{n}" for n in range(2)]
        self.cables = [f"lac{os.getpid() % 100000}-{n}" for n in range(2)]
        self.addresses = ["10.213.77.1", "10.213.77.2"]

    def connect(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.cables[0], "netns", self.names[0], "type", "veth", "peer", "name", self.cables[1],
           "netns", self.names[1])
        for name, cable, address in zip(self.names, self.cables, self.addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    try:
        if os.geteuid() != 0:
            pytest.skip("network namespaces need root")
        made.connect()
        yield made
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    finally:
        made.remove()


RECIPE = re.search(r"srun bash -c '(.*?)'", (ROOT / "docs/tutorials/clusters.md").read_text(), re.DOTALL)


class NodesLaunch:
    """The recipe for Slurm of docs/tutorials/clusters.md: one launcher a node, without ssh."""

    def __init__(self, nodes: Nodes, body: dict, folder: Path):
        self.folder = folder / body["name"]
        config, hosts = folder / f"{body['name']}.yaml", folder / "hosts"
        config.write_text(yaml.safe_dump({**body, "run_folder": str(folder)}))
        hosts.write_text("".join(f"{address} slots=1\n" for address in nodes.addresses))
        assert RECIPE is not None
        recipe = re.sub(r"--config \S+", f"--config {config}", RECIPE[1]).replace("trainer/run.py", RUN_SCRIPT)
        recipe = recipe.replace("--hostfile hosts", f"--hostfile {hosts}").replace("29500", str(launches.free_port()))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.launchers, self.outputs = [], []
        for number, (name, cable) in enumerate(zip(nodes.names, nodes.cables, strict=True)):
            self.outputs.append(folder / f"node-{number}-{time.monotonic_ns()}.out")
            variables = environment(GLOO_SOCKET_IFNAME=cable, PATH=path, MASTER=nodes.addresses[0],
                                    SLURM_NODEID=str(number))
            with open(self.outputs[-1], "wb") as out:
                self.launchers.append(subprocess.Popen(["ip", "netns", "exec", name, "bash", "-c", recipe], stdout=out,
                                                       stderr=subprocess.STDOUT, start_new_session=True, cwd=folder,
                                                       env=variables))

    def wait(self, seconds: float = 600) -> list[int]:
        end = time.monotonic() + seconds
        try:
            return [launcher.wait(max(1, end - time.monotonic())) for launcher in self.launchers]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {seconds} s:\n{self.text()[-3000:]}") from None
        finally:
            for launcher in self.launchers:
                if launcher.poll() is None:
                    os.killpg(launcher.pid, signal.SIGKILL)

    def text(self) -> str:
        return "\n".join(output.read_text(errors="replace") for output in self.outputs)

    def wait_for_step(self, step: int) -> None:
        end = time.monotonic() + 600
        while not (self.folder / "metrics.jsonl").exists() or not any(
                line["step"] >= step for line in metrics(self.folder)):
            assert all(launcher.poll() is None for launcher in self.launchers), self.text()[-3000:]
            assert time.monotonic() < end, self.text()[-3000:]
            time.sleep(0.02)

    def rank_of_node(self, number: int) -> int:
        """Pid of the training process that a node's launcher started."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if os.getsid(int(entry.name)) == self.launchers[number].pid and \
                            b"--local_rank" in (entry / "cmdline").read_bytes():
                        return int(entry.name)
                except OSError:
                    continue
        raise AssertionError("no rank found")


def test_two_nodes_one_of_which_dies(nodes, single_shards, en_scl_reference, tmp_path):
    body = en_scl_config(single_shards, "two-nodes")
    launch = NodesLaunch(nodes, body, tmp_path)
    launch.wait_for_step(17)  # inside the second epoch, after a checkpoint inside it
    os.kill(launch.rank_of_node(1), signal.SIGKILL)
    assert all(code != 0 for code in launch.wait()), launch.text()[-3000:]
    again = NodesLaunch(nodes, body, tmp_path)
    assert again.wait() == [0, 0], again.text()[-3000:]
    assert "resuming from" in again.text()
    assert trace(again.folder) == trace(en_scl_reference)
    assert_equal_weights(en_scl_reference, again.folder)
    for name, values in stored(en_scl_reference).items():
        np.testing.assert_array_equal(stored(again.folder)[name], values, name)
    assert timeless(metrics(again.folder)) == timeless(metrics(en_scl_reference))


def written(folder: Path, checkpoint: str) -> dict[tuple[str, int], np.ndarray]:
    """(field, shard) → rows of the shards that training has reached."""
    reader = state_store.open(str(folder / "state")).reader(checkpoint)
    return {(field, shard): reader.read_shard(field, shard)
            for field, shards in reader.refs.items() for shard in shards}


@pytest.mark.long
def test_four_ranks_then_two_then_one(single_shards, en_scl_reference, tmp_path):
    body = en_scl_config(single_shards, "shrinking")
    for ranks, step in ((4, 8), (2, 18)):
        launch = Launch(body, tmp_path, ranks)
        launch.wait_for_step(step)
        launch.signal_all(signal.SIGKILL)
        launch.wait()
    at = last_checkpoint(tmp_path / "shrinking").name
    kept = written(tmp_path / "shrinking", at)
    launch = Launch(body, tmp_path, 1, "train.keep=20")
    launch.ok()
    assert f"checkpoints/{at}" in launch.text(), "one rank goes on where two were"
    again = written(launch.folder, at)
    assert again.keys() == kept.keys()
    assert all(np.array_equal(again[place], kept[place]) for place in kept), "it has the state of two ranks"
    assert trace(launch.folder) == trace(en_scl_reference)
    np.testing.assert_allclose(losses(launch.folder), losses(en_scl_reference), rtol=1e-5)
    for name, value in weights(launch.folder).items():
        torch.testing.assert_close(value, weights(en_scl_reference)[name], rtol=1e-5, atol=1e-5)
    found = stored(launch.folder)
    for name, values in stored(en_scl_reference).items():
        if values.dtype == np.uint8:
            apart = np.abs(values.astype(int) - found[name].astype(int))
            assert apart.max() <= 1, name
            assert (apart > 0).mean() <= 1e-3, name
        else:
            np.testing.assert_allclose(found[name].astype(np.float64), values.astype(np.float64), atol=1e-3)
