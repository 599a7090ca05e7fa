"""A Ray cluster of this machine, in processes of its own, and what its workers are doing."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lacuna.tools.launches import Launch
from tests.helpers.launching import environment


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[tuple[str, list[Launch], dict[str, str]]]:
    """Of one core each: (address, nodes, environment of whoever joins)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Newer versions of Ray ask for a token: one of this cluster alone.
    variables = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as short:  # for sockets
        kinds = [["--head", f"--port={port}", f"--temp-dir={short}", "--include-dashboard=false"],
                 [f"--address=127.0.0.1:{port}"]]
        nodes: list[Launch] = []
        try:
            for words in kinds:
                nodes.append(_start(words, folder / f"node-{len(nodes)}.out", variables))
            yield f"127.0.0.1:{port}", nodes, variables
        finally:
            for node in reversed(nodes):
                node.signal_all(signal.SIGTERM)
                node.wait()


def _start(words: list[str], output: Path, variables: dict[str, str]) -> Launch:
    common = ["--num-cpus=1", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
    node = Launch([sys.executable, "-m", "ray.scripts.scripts", "start", *words, *common], str(output), variables,
                  str(output.parent))
    node.wait_until(lambda: "Ray runtime started" in node.text(), "its start")
    return node


def wait_until_nobody_trains(sessions: list[int]) -> None:
    """Ray's workers, of these sessions, notice that the command they worked for is gone, and end."""
    end = time.monotonic() + 60
    while busy := [pid for pid in _performing() if _session(pid) in sessions]:
        assert time.monotonic() < end, f"still at work: {busy}"
        time.sleep(0.1)


def _performing() -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_bytes().startswith(b"ray::perform"):
                yield int(path.parent.name)


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None
