"""Processor, memory, accelerators, limits and the network name of this machine."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Iterator

from lacuna.basics.errors import UserError
from lacuna.tools.doctor.finding import OK, PROBLEM, WARNING, Finding

_FEW_FILES = 4096  # open shards × streams, sockets of Ray and gloo


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


def bf16() -> Iterator[Finding]:
    """Whether train.precision=bf16 works on this CPU: some announce instructions that kill whoever uses them."""
    from lacuna.trainer.bf16 import check

    try:
        needed = check.needed_instruction_set()
    except UserError as error:
        yield Finding("bf16 on the CPU", WARNING, str(error), "Use train.precision=fp32 here.")
        return
    if needed is None:
        yield Finding("bf16 on the CPU", OK, "works (train.precision=bf16)")
    else:
        yield Finding("bf16 on the CPU", WARNING, f"works only with {check.VARIABLE}={needed}",
                      "The CPU announces instructions that end the process. Training sets the variable by itself; "
                      "set it for programs of your own.")


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
