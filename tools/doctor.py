"""Looks at what training will meet on this machine, one line a fact: ok, warning or problem, and what to do.

  lacuna doctor                          everything; disk speed is measured in the current folder
  lacuna doctor --quick                  without what takes seconds (disk speed, starting Ray)
  lacuna doctor --folder /data/runs --s3 s3://bucket/prefix      the places that runs will use
  lacuna doctor --json                   the same for programs
Exit code 0 if nothing is a problem (warnings are allowed), 1 otherwise. --s3 writes and deletes one small object.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from lacuna.basics import storage
from lacuna.basics.errors import UserError

OK, WARNING, PROBLEM = "ok", "warning", "problem"
_TRIAL_BYTES = 128 << 20
_SLOW_DISK = 100e6  # bytes per second: below it decoded JPEGs of a single GPU already wait
_FEW_FILES = 4096  # open shards × streams, sockets of Ray and gloo
_RAY_SECONDS = 120
_RAY_TRIAL = """
import ray, sys
ray.init(num_cpus=1, include_dashboard=False, configure_logging=False, _temp_dir=sys.argv[1])
print(ray.get(ray.remote(lambda: 41 + 1).remote()))
ray.shutdown()
"""


@dataclass(frozen=True)
class Finding:
    check: str
    level: str  # OK, WARNING or PROBLEM
    found: str
    advice: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", default=".", help="place of runs and shards; its disk is measured (default: .)")
    parser.add_argument("--s3", metavar="URL", help="any fsspec URL that must be reachable, e.g. s3://bucket/prefix")
    parser.add_argument("--quick", action="store_true", help="leave out disk speed and starting Ray")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    if not os.path.isdir(args.folder):
        raise UserError(f"--folder {args.folder}: no such folder. Make it, or name one that exists.")
    findings = []
    for check in checks(args):
        for finding in _guarded(check):
            findings.append(finding)
            if not args.json:
                print(as_line(finding), flush=True)
    counts = {level: sum(f.level == level for f in findings) for level in (OK, WARNING, PROBLEM)}
    if args.json:
        print(json.dumps({"ok": not counts[PROBLEM], "counts": counts, "checks": [asdict(f) for f in findings]}))
    else:
        print(f"{counts[OK]} ok, {counts[WARNING]} warnings, {counts[PROBLEM]} problems")
    return 1 if counts[PROBLEM] else 0


def checks(args: argparse.Namespace) -> list[Callable[[], Iterator[Finding]]]:
    found: list[Callable[[], Iterator[Finding]]] = [
        versions, processor, accelerators, lambda: space(args.folder), shared_memory, file_limit, host_name,
        deepspeed_ops]
    if not args.quick:
        found += [lambda: disk_speed(args.folder), ray_starts]
    if args.s3:
        found.append(lambda: object_storage(args.s3))
    return found


def as_line(finding: Finding) -> str:
    line = f"{finding.level:<8} {finding.check:<14} {finding.found}"
    wrapped = textwrap.wrap(finding.advice, 90, initial_indent=" " * 24 + "→ ", subsequent_indent=" " * 26)
    return "\n".join([line, *wrapped])


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A check that fails in a way nobody thought of is a finding too, not the end of the examination."""
    try:
        yield from check()
    except Exception as error:
        name = getattr(check, "__name__", "").strip("<>").replace("_", " ")
        yield Finding(name, PROBLEM, f"{type(error).__name__}: {error}", "Report this with the full output.")


def versions() -> Iterator[Finding]:
    """This program's own requirements, as its package declares them, against what is installed."""
    from packaging.requirements import Requirement  # pip's own reading of a requirement; DeepSpeed brings it

    yield Finding("python", OK, f"{platform.python_version()} on {platform.platform()}")
    try:
        declared = importlib.metadata.requires("lacuna") or []
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
    yield Finding("packages", OK, f"lacuna {importlib.metadata.version('lacuna')}, " + ", ".join(good))


def processor() -> Iterator[Finding]:
    cores, usable = os.cpu_count() or 1, len(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS")
    text = f"{usable} of {cores} cores usable, load {os.getloadavg()[0]:.1f}, OMP_NUM_THREADS {threads or 'unset'}"
    if not threads:
        yield Finding("cpu", WARNING, text, "Several ranks on one machine fight for the cores: set OMP_NUM_THREADS to "
                                            "cores ÷ ranks, and OMP_WAIT_POLICY=PASSIVE when cores are shared.")
    else:
        yield Finding("cpu", OK, text)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _available_memory()
    yield Finding("memory", OK if free > 4e9 else WARNING, f"{free / 1e9:.1f} GB of {total / 1e9:.1f} GB available",
                  "" if free > 4e9 else "A rank needs about 2 GB besides train.state_budget_mb.")


def _available_memory() -> int:
    with open("/proc/meminfo", encoding="ascii") as f:
        facts = dict(line.split(":", 1) for line in f)
    return int(facts["MemAvailable"].split()[0]) * 1024


def accelerators() -> Iterator[Finding]:
    import torch
    import torchvision

    # The two come as a pair: a wrong pair imports and fails at its first operator.
    torchvision.ops.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)
    if not torch.cuda.is_available():
        hidden = shutil.which("nvidia-smi")
        if hidden and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
            yield Finding("gpu", PROBLEM, f"{hidden} is there, but torch {torch.__version__} sees no GPU",
                          "Install a torch built for this driver's CUDA (pytorch.org), or update the driver.")
        else:
            yield Finding("gpu", WARNING, "none: training runs on the CPU",
                          "Fine for the demo and feature shards; images at 448 px want GPUs. Set DS_ACCELERATOR=cpu.")
        return
    for i in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(i)
        half = "bf16" if torch.cuda.is_bf16_supported() else "no bf16: use train.precision=fp32"
        yield Finding("gpu", OK, f"{i}: {facts.name}, {facts.total_memory / 1e9:.0f} GB, {half}")


def space(folder: str) -> Iterator[Finding]:
    usage = shutil.disk_usage(folder)
    low = usage.free < 10e9
    yield Finding("disk space", WARNING if low else OK, f"{usage.free / 1e9:.1f} GB free in {os.path.abspath(folder)}",
                  "Checkpoints and state are kept train.keep + 1 times: choose another run_folder or make room." if low
                  else "")


def shared_memory(path: str = "/dev/shm") -> Iterator[Finding]:
    if not os.path.isdir(path):
        yield Finding("/dev/shm", WARNING, "not there", "NCCL and Ray use it. Mount a tmpfs of a few GB.")
        return
    size = shutil.disk_usage(path).total
    low = size < 1e9
    yield Finding("/dev/shm", WARNING if low else OK, f"{size / 1e9:.2f} GB",
                  "NCCL and Ray's object store need more: in Docker pass --shm-size=8g." if low else "")


def file_limit() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = soft == resource.RLIM_INFINITY
    low = not endless and soft < _FEW_FILES
    yield Finding("open files", WARNING if low else OK, f"limit {'none' if endless else soft} (hard {hard})",
                  f"Open shards and sockets need more: run `ulimit -n {_FEW_FILES}` before training." if low else "")


def host_name() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        yield Finding("host name", OK, f"{name} → {socket.gethostbyname(name)}")
    except OSError as error:
        yield Finding("host name", WARNING, f"{name} has no address ({error})",
                      "gloo and Ray look it up: add it to /etc/hosts, or set GLOO_SOCKET_IFNAME (e.g. lo or eth0).")


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


def disk_speed(folder: str) -> Iterator[Finding]:
    """Sequential write with fsync and a read that the page cache cannot answer."""
    path = os.path.join(folder, f".lacuna-doctor-{uuid.uuid4().hex[:8]}")
    block = os.urandom(1 << 20)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        began = time.monotonic()
        for _ in range(_TRIAL_BYTES // len(block)):
            os.write(descriptor, block)
        os.fsync(descriptor)
        written = _TRIAL_BYTES / (time.monotonic() - began)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(descriptor, 0, os.SEEK_SET)
        began = time.monotonic()
        while os.read(descriptor, len(block)):
            pass
        read = _TRIAL_BYTES / (time.monotonic() - began)
        began = time.monotonic()
        for _ in range(10):
            os.pwrite(descriptor, b"x", 0)
            os.fsync(descriptor)
        sync = (time.monotonic() - began) / 10
    finally:
        os.close(descriptor)
        os.remove(path)
    slow = min(written, read) < _SLOW_DISK
    yield Finding("disk speed", WARNING if slow else OK,
                  f"write {written / 1e6:,.0f} MB/s, read {read / 1e6:,.0f} MB/s, fsync {sync * 1e3:.1f} ms",
                  "Shards and state stream from here: put them on a faster disk (data.*.url, train.state_url)." if slow
                  else "")


def ray_starts() -> Iterator[Finding]:
    """A real start in a process of its own: what fails there (ports, /dev/shm, old nodes) cannot be seen otherwise."""
    import tempfile

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


_RAY_ADVICE = ("Training does not need it; passes over whole datasets do. Look at the host name and /dev/shm lines "
               "above, and end old Ray nodes of yours with `ray stop`.")


def object_storage(url: str) -> Iterator[Finding]:
    """Write, read back, conditional create (the store's commits rest on it) and delete one object."""
    name = storage.join(url, f"lacuna-doctor-{uuid.uuid4().hex[:12]}")
    began = time.monotonic()
    try:
        first = storage.create_exclusive(name, b"one")
        second = storage.create_exclusive(name, b"two")
        content = storage.read_bytes(name)
        storage.remove([name])
    except Exception as error:  # clients raise kinds of their own
        advice = ("Check the bucket's name, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, for servers that are not "
                  "Amazon's, AWS_ENDPOINT_URL.") if url.startswith("s3") else "Check the URL and its credentials."
        yield Finding("object storage", PROBLEM, f"{url}: {type(error).__name__}: {error}", advice)
        return
    seconds = time.monotonic() - began
    if (first, second, content) != (True, False, b"one"):
        yield Finding("object storage", PROBLEM, f"{url}: a conditional create replaced an object",
                      "Two launches could damage each other's state there: use a store with conditional PUT, or a "
                      "file system.")
    else:
        yield Finding("object storage", OK, f"{url}: create, refuse, read and delete in {seconds:.2f} s")
