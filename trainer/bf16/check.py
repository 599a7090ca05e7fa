"""Finds out in a child process whether bf16 works on this CPU, and which of oneDNN's instruction sets that needs.

A CPU may announce AMX or AVX-512 without having it (virtual machines do): the first bf16 product then ends the process
by SIGILL. oneDNN reads ONEDNN_MAX_CPU_ISA once, at its first operation: setting it works until then. What was found is
kept in the user's cache folder until the next boot, so that not every rank of every launch starts a child.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from lacuna.basics.deaths import describe_exit
from lacuna.basics.errors import UserError

VARIABLE = "ONEDNN_MAX_CPU_ISA"
INSTRUCTION_SETS = ("AVX512_CORE_BF16", "AVX512_CORE", "AVX2")  # from fast to safe; AMX is above all of them
_PROBE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "probe.py")
_PATIENCE_SECONDS = 300


@functools.cache
def make_safe() -> str | None:
    """Before the first bf16 operation on the CPU: set what this CPU needs; one line about that, or None.

    Raises UserError if bf16 cannot work in this process.
    """
    needed = needed_instruction_set()
    if needed is None:
        return None
    os.environ[VARIABLE] = needed
    if not _works_here():
        raise UserError(f"train.precision = 'bf16' needs {VARIABLE}={needed} on this CPU, but this process has used "
                        "oneDNN before it could be set. Set it before Python starts, or use train.precision=fp32.")
    return (f"bf16: this CPU announces instructions that end the process; {VARIABLE}={needed} is set, which works "
            "(see `lacuna doctor`)")


def needed_instruction_set() -> str | None:
    """What ONEDNN_MAX_CPU_ISA must be for bf16; None if all is well as it is. UserError if nothing helps."""
    with _notebook() as notes:
        key = _this_machine()
        if notes.get("machine") == key and notes.get("needed") in (None, *INSTRUCTION_SETS):
            return notes["needed"]
        found = _find()
        notes |= {"machine": key, "needed": found}
        return found


def _find() -> str | None:
    first = _death(None)
    if first is None:
        return None
    for name in INSTRUCTION_SETS:
        if _death(name) is None:
            return name
    raise UserError(f"train.precision = 'bf16' does not work on this CPU: a trial {first}, also with {VARIABLE} = "
                    f"{', '.join(INSTRUCTION_SETS)}. Use train.precision=fp32.")


def _death(instruction_set: str | None) -> str | None:
    """How the trial ended if not well: with this instruction set, or with the environment as it is."""
    environment = os.environ if instruction_set is None else {**os.environ, VARIABLE: instruction_set}
    try:
        done = subprocess.run([sys.executable, "-P", _PROBE], env=environment, capture_output=True,
                              timeout=_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        raise UserError(f"train.precision = 'bf16': a trial in a child process did not end within {_PATIENCE_SECONDS} "
                        "s. Start again when the machine is less busy, or use train.precision=fp32.") from None
    if done.returncode == 0:
        return None
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return describe_exit(done.returncode) + (f" ({last[0]})" if last and done.returncode > 0 else "")


def _works_here() -> bool:
    """The same trial in a copy of this very process, which may have initialised oneDNN already."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            import torch

            from lacuna.trainer.bf16 import probe

            torch.set_num_threads(1)  # the parent's other threads are not in the copy
            code = probe.main()
        os._exit(code)
    end = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < end:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    return False


def _this_machine() -> str:
    """Changes with everything that the answer depends on: boot, CPU, torch, environment."""
    facts = [importlib.metadata.version("torch"), sys.executable]
    facts += sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(("ONEDNN", "DNNL", "ATEN", "MKL")))
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/cpuinfo"):
        with contextlib.suppress(OSError), open(path, encoding="utf-8") as f:
            facts += sorted({line for line in f if path != "/proc/cpuinfo" or line.startswith(("model name", "flags"))})
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


@contextlib.contextmanager
def _notebook() -> Iterator[dict]:
    """The cached answer, to be changed in place. Ranks take turns: the first to come does the trial for all."""
    folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "lacuna")
    notes: dict = {}
    try:
        os.makedirs(folder, exist_ok=True)
        f = open(os.path.join(folder, "bf16.json"), "a+", encoding="utf-8")  # noqa: SIM115
    except OSError:  # no home, a full disk: every process finds out for itself
        yield notes
        return
    with f:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(f, fcntl.LOCK_EX)
        f.seek(0)
        with contextlib.suppress(ValueError):
            read = json.load(f)
            notes = read if isinstance(read, dict) else notes
        before = dict(notes)
        yield notes
        if notes != before:
            with contextlib.suppress(OSError):
                f.seek(0)
                f.truncate()
                json.dump(notes, f)
