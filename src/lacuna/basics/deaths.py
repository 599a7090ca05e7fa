"""How a process ended, in words: the signal that killed it, and what that usually means."""

from __future__ import annotations

import signal

_MEANINGS = {
    signal.SIGILL: "illegal instruction: the CPU announces a feature that it does not have, as some virtual machines "
                   "do; `lacuna doctor` tries bf16, ONEDNN_MAX_CPU_ISA=AVX2 avoids such features",
    signal.SIGABRT: "aborted: a library gave up; its message is above",
    signal.SIGBUS: "bus error: /dev/shm or a disk that a file is mapped from is full; in Docker pass --shm-size=8g",
    signal.SIGFPE: "arithmetic error in compiled code",
    signal.SIGKILL: "killed: by the system when memory ran out (see `dmesg`), by a scheduler, or by hand",
    signal.SIGSEGV: "segmentation fault: an error in compiled code; `lacuna doctor` compares the versions of packages",
    signal.SIGPIPE: "broken pipe: whoever read its output is gone",
    signal.SIGTERM: "asked to end, by a scheduler, by the launcher or by hand",
    signal.SIGINT: "interrupted at the keyboard",
    signal.SIGHUP: "its terminal was closed",
    signal.SIGXCPU: "the limit on processor time was reached (`ulimit -t`)",
    signal.SIGXFSZ: "the limit on the size of files was reached (`ulimit -f`)",
    signal.SIGSYS: "a system call that the container or sandbox forbids",
}


def death_signal(code: int) -> int | None:
    """The signal behind an exit code: negative as Python gives it, 128 + its number from shells, 256 − its number from
    DeepSpeed's launcher. 255 is what ssh and many programs give for any failure."""
    if code < 0:
        number = -code
    else:
        number = 256 - code if 256 - 64 < code < 255 else code - 128
    return number if number in set(signal.Signals) else None


def describe_exit(code: int) -> str:
    """Completes "the process …"."""
    number = death_signal(code)
    if number is None:
        return f"ended with exit code {code}"
    meaning = _MEANINGS.get(signal.Signals(number))
    return f"died by {signal.Signals(number).name} (signal {number}{', ' + meaning if meaning else ''})"
