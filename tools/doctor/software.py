"""Versions, DeepSpeed and its launcher, Ray: what is installed, and whether it starts."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import lacuna
from lacuna.tools.doctor.finding import OK, PROBLEM, WARNING, Finding

_DISTRIBUTION = "lacuna-trainer"
_RAY_SECONDS = 120
_RAY_TRIAL = """
import ray, sys
ray.init(num_cpus=1, include_dashboard=False, configure_logging=False, _temp_dir=sys.argv[1])
print(ray.get(ray.remote(lambda: 41 + 1).remote()))
ray.shutdown()
"""
_RAY_ADVICE = ("Training does not need it; passes over whole datasets do. Look at the host name and /dev/shm lines "
               "above, and end old Ray nodes of yours with `ray stop`.")


def versions() -> Iterator[Finding]:
    """This program's own requirements, as its package declares them, against what is installed."""
    from packaging.requirements import Requirement  # pip's own reading of a requirement

    yield Finding("python", OK, f"{platform.python_version()} on {platform.platform()}")
    try:
        declared = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("lacuna", WARNING, "runs from a folder that is not installed", "Run `make install` in it.")
        return
    bad: list[str] = []
    good: list[str] = []
    for requirement in map(Requirement, declared):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            bad.append(f"{requirement.name} is missing")
            continue
        fits = requirement.specifier.contains(version, prereleases=True)
        note = "" if fits else f" (needed: {requirement.specifier})"
        (good if fits else bad).append(f"{requirement.name} {version}{note}")
    if bad:
        yield Finding("packages", PROBLEM, ", ".join(bad), "Run `make install`, or `pip install -e .` in the project.")
    yield Finding("packages", OK, f"lacuna {lacuna.__version__}, " + ", ".join(good))


def namesake() -> Iterator[Finding]:
    """Another project's distribution is called `lacuna`: installed beside ours, its files may stand in for ours."""
    try:
        other = importlib.metadata.version("lacuna")
    except importlib.metadata.PackageNotFoundError:
        return
    yield Finding("namesake", WARNING, f"the package `lacuna` {other} of another project is installed, too",
                  f"Both are imported as `lacuna`; this one is called {_DISTRIBUTION}. Run `pip uninstall lacuna` and "
                  "install this one again: `make install`, or `pip install --force-reinstall --no-deps` of its wheel.")


def deepspeed_ops() -> Iterator[Finding]:
    import logging

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    from deepspeed.accelerator import get_accelerator
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder.all_ops import ALL_OPS

    built = sorted(name for name, there in installed_ops.items() if there)
    tools = {tool: bool(shutil.which(tool)) for tool in ("g++", "ninja", "nvcc")}
    possible = sum(bool(builder.is_compatible(verbose=False)) for builder in ALL_OPS.values())
    compilers = ", ".join(tool + ("" if there else " absent") for tool, there in tools.items())
    # Training uses torch's optimizers and gloo/NCCL, so no op has to be compiled.
    yield Finding("deepspeed", OK, f"accelerator {get_accelerator().device_name()}; no op is needed; prebuilt: "
                                   f"{', '.join(built) or 'none'}; could be compiled: {possible} ({compilers})")
    places = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    launcher = shutil.which("deepspeed", path=places)
    yield Finding("launcher", OK if launcher else PROBLEM, launcher or "no `deepspeed` command",
                  "" if launcher else "Run `make install`.")


def ray_starts() -> Iterator[Finding]:
    """A real start in a process of its own: what fails there (ports, /dev/shm, old nodes) cannot be seen otherwise."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="doctor-", dir="/tmp") as folder:  # its socket paths must be short
        try:
            done = subprocess.run([sys.executable, "-c", _RAY_TRIAL, folder], capture_output=True, text=True,
                                  timeout=_RAY_SECONDS)
        except subprocess.TimeoutExpired:
            yield Finding("ray", WARNING, f"did not start within {_RAY_SECONDS} s", _RAY_ADVICE)
            return
    if done.returncode or done.stdout.split()[-1:] != ["42"]:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding("ray", WARNING, f"does not start: {last}", _RAY_ADVICE)
    else:
        yield Finding("ray", OK, f"started and ran a task in {time.monotonic() - began:.0f} s")
