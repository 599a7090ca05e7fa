"""The places that runs will use: free space, speed, and whether object storage answers."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterator

from lacuna.basics import storage
from lacuna.tools.doctor.finding import OK, PROBLEM, WARNING, Finding

_TRIAL_BYTES = 128 << 20
_SLOW_DISK = 100e6  # bytes per second: below it decoded JPEGs of a single GPU already wait


def space(folder: str) -> Iterator[Finding]:
    usage = shutil.disk_usage(folder)
    low = usage.free < 10e9
    yield Finding("disk space", WARNING if low else OK, f"{usage.free / 1e9:.1f} GB free in {os.path.abspath(folder)}",
                  "Checkpoints and state are kept train.keep + 1 times: choose another run_folder or make room." if low
                  else "")


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
