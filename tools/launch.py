"""Starts training the way the README says, as a child process: `deepspeed … trainer/run.py --config …`."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys

from data_pipelines.errors import UserError

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def launch(config: str, overrides: list[str], ranks: int | None, hostfile: str | None = None) -> int:
    """The exit code. ranks: processes on this machine (default: one per GPU, as DeepSpeed does); or a hostfile."""
    launcher = os.path.join(os.path.dirname(sys.executable), "deepspeed")
    if shutil.which(launcher) is None:
        raise UserError(f"{launcher}: not found. Install the project with `make install`.")
    # A port of its own: two launches on one machine do not meet. Several nodes must agree on one, DeepSpeed's default.
    where = ["--hostfile", hostfile] if hostfile else ["--master_port", str(_free_port())]
    where += ["--num_accelerators", str(ranks)] if ranks else []
    # Several ranks on few cores: one thread each, and no busy waiting.
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    script = [os.path.join(ROOT, "trainer", "run.py"), "--config", config, *overrides]
    return subprocess.run([launcher, *where, *script], env=environment).returncode


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
