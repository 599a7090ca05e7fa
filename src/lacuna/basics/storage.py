"""Bytes in and out of local disk and any fsspec URL: the one layer under shards, state and checkpoints.

Local writes are atomic (temporary file, fsync, rename) because fsspec's own local writes are not; on object
storage a PUT is atomic by contract. Transient remote failures are retried with backoff.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs

from lacuna.basics.errors import UserError
from lacuna.basics.retries import TRANSFER_SECONDS, retrying

Buffer = Any  # bytes, bytearray, memoryview or a contiguous array
_SYNC_THREADS = 8
_SYNC_ALL_ABOVE = 1000
_CONNECT_SECONDS, _SILENCE_SECONDS = 30, 60


def is_local(url: str) -> bool:
    return "://" not in url or url.startswith("file://")


def local_path(url: str) -> str:
    """The path behind a local URL."""
    return url.removeprefix("file://")


def join(url: str, *parts: str) -> str:
    """Empty parts add nothing: on object storage `a//b` is another object than `a/b`."""
    return "/".join([url.rstrip("/") or "/", *[p.strip("/") for p in parts if p.strip("/")]])


def _file_system(url: str, **options: Any) -> tuple[AbstractFileSystem, str]:
    """The file system behind a remote URL, and the path in it.

    Without its cache of listings: other processes write too, and an object that is newer than a listing would be
    "not found".
    """
    try:
        return url_to_fs(url, use_listings_cache=False, **options)
    except (ValueError, ImportError) as error:  # no such protocol, or no package for it
        raise UserError(f"{url}: cannot be opened ({error}). Give a path or a URL such as s3://bucket/dir.") from None


def read_bytes(url: str, expected: int | None = None) -> bytes:
    """The whole object; FileNotFoundError if there is none.

    Who knows the size passes it as `expected`: a shorter answer is then noticed without asking the server again.
    """
    if is_local(url):
        with open(local_path(url), "rb") as f:
            return f.read()

    def fetch() -> bytes:
        fs, path = _file_system(url)
        for _ in range(2):  # the object may have been replaced between the two questions
            data = fs.cat_file(path)
            whole = fs.size(path) if expected is None else expected
            if whole is None or whole == len(data):
                return data
        raise OSError(f"{url}: got {len(data)} of {whole} bytes")

    return retrying(fetch, url)


def open_stream(url: str) -> BinaryIO:
    """A file object for one sequential read; over HTTP a read may return fewer bytes than were asked for."""
    if is_local(url):
        return open(local_path(url), "rb")
    # Not fsspec.open: it hands the block size to the file system's constructor, which s3fs refuses.
    if url.startswith(("http://", "https://")):
        # One plain request: not every server knows ranges. A silent one is given up; a slow one may take its time.
        import aiohttp  # a third of a second

        patience = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=_SILENCE_SECONDS)
        web, path = _file_system(url, client_kwargs={"timeout": patience})
        return retrying(lambda: web.open(path, "rb", block_size=0), url)
    fs, path = _file_system(url)
    return retrying(lambda: fs.open(path, "rb", block_size=8 << 20), url)


def write_atomic(url: str, data: bytes | bytearray | memoryview, durable: bool = True) -> None:
    """Replace the object in one step: a reader sees the old or the new bytes, never a mixture."""
    if not is_local(url):
        fs, path = _file_system(url)
        retrying(lambda: fs.pipe_file(path, bytes(data)), url)
        return
    path = local_path(url)
    _make_folder(os.path.dirname(path))
    temporary = f"{path}.{uuid.uuid4().hex[:8]}.partial"
    try:
        _write_whole(temporary, data, durable)
        os.replace(temporary, path)
    except BaseException:
        remove([temporary])
        raise
    if durable:
        sync_folder(os.path.dirname(path))


def write_new(url: str, parts: Sequence[Buffer]) -> None:
    """Write an object that nothing refers to yet, under a name used once: no rename and no fsync are needed.

    What makes it durable is `sync` before the reference to it is published; a torn one is an orphan.
    """
    if not is_local(url):
        fs, path = _file_system(url)
        data = b"".join(bytes(part) for part in parts)
        retrying(lambda: fs.pipe_file(path, data), url)
        return
    path = local_path(url)
    try:
        f = open(path, "wb")  # noqa: SIM115 (opened twice when the folder is new)
    except FileNotFoundError:
        _make_folder(os.path.dirname(path))
        f = open(path, "wb")  # noqa: SIM115
    try:
        with f:
            for part in parts:
                f.write(part)
    except BaseException:
        remove([url])
        raise


def sync(urls: Iterable[str]) -> None:
    """Make local objects survive a power loss: their bytes, then their names. Remote ones already do.

    Concurrent fsyncs share journal commits (9× faster than one after another); thousands of files are cheaper in one
    call for the whole file system.
    """
    paths = [local_path(url) for url in urls if is_local(url)]
    if not paths:
        return
    folders = sorted({os.path.dirname(path) for path in paths})
    if len(paths) > _SYNC_ALL_ABOVE and all(_sync_file_system(folder) for folder in folders):
        return
    with ThreadPoolExecutor(_SYNC_THREADS) as pool:
        list(pool.map(sync_folder, paths))  # a file is synced like a folder: by its descriptor
        list(pool.map(sync_folder, folders))


def _make_folder(folder: str) -> None:
    """Create a local folder and its parents durably: a file in a folder that a power loss undoes is lost with it."""
    if not folder or os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    _make_folder(parent)
    os.makedirs(folder, exist_ok=True)
    sync_folder(parent)


def _sync_file_system(folder: str) -> bool:
    """syncfs(2) of the file system that holds the folder; False where there is no such call."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    if call is None:
        return False
    descriptor = os.open(folder or ".", os.O_RDONLY)
    try:
        if call(descriptor) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), folder)
    finally:
        os.close(descriptor)
    return True


def create_exclusive(url: str, data: bytes) -> bool:
    """Create the object only if there is none (durably); False when someone else was first."""
    if not is_local(url):
        fs, path = _file_system(url)
        try:
            retrying(lambda: fs.pipe_file(path, data, mode="create"), url)
        except FileExistsError:
            # A retried request may have met its own earlier success.
            return read_bytes(url) == data
        return True
    path = local_path(url)
    _make_folder(os.path.dirname(path))
    temporary = f"{path}.{uuid.uuid4().hex[:8]}.partial"
    try:
        _write_whole(temporary, data, durable=True)
        # A hard link fails if the name exists, and the content appears whole: create-if-absent without tearing.
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        remove([temporary])
    sync_folder(os.path.dirname(path))
    return True


def _write_whole(path: str, data: bytes | bytearray | memoryview, durable: bool) -> None:
    with open(path, "wb") as f:
        f.write(data)
        if durable:
            f.flush()
            os.fsync(f.fileno())


def exists(url: str) -> bool:
    if is_local(url):
        return os.path.exists(local_path(url))
    fs, path = _file_system(url)
    return retrying(lambda: fs.exists(path), url)


def size(url: str) -> int:
    if is_local(url):
        return os.path.getsize(local_path(url))
    fs, path = _file_system(url)
    return retrying(lambda: fs.size(path), url)


def list_names(url: str) -> list[str]:
    """Names directly below the folder, sorted; empty if there is no such folder."""
    try:
        if is_local(url):
            return sorted(os.listdir(local_path(url)))
        fs, path = _file_system(url)
        found = retrying(lambda: fs.ls(path, detail=False), url)
        return sorted({p.rstrip("/").rsplit("/", 1)[-1] for p in found} - {""})
    except FileNotFoundError:
        return []


def list_prefix(url: str, prefix: str) -> list[str]:
    """Names below a folder on object storage that start with `prefix`, sorted; the server sends no others."""
    fs, path = _file_system(url)
    try:
        found = retrying(lambda: fs.find(path, prefix=prefix), url)
    except FileNotFoundError:
        return []
    return sorted(name for p in found if (name := p.rsplit("/", 1)[-1]).startswith(prefix))


def list_tree(url: str) -> list[str]:
    """URLs of all objects below a remote folder, sorted; empty if there is no such folder."""
    fs, path = _file_system(url)
    try:
        return [fs.unstrip_protocol(found) for found in sorted(retrying(lambda: fs.find(path), url))]
    except FileNotFoundError:
        return []


def remove(urls: list[str]) -> None:
    """Delete objects; those already gone are fine. Remote ones go in batches: one request for up to 1000 on S3."""
    remote = [url for url in urls if not is_local(url)]
    for url in urls:
        if is_local(url):
            with contextlib.suppress(FileNotFoundError):
                os.remove(local_path(url))
    for start in range(0, len(remote), 1000):
        fs, _ = _file_system(remote[start])
        paths = [_file_system(url)[1] for url in remote[start : start + 1000]]
        try:
            retrying(lambda fs=fs, paths=paths: fs.rm(paths), remote[start])  # type: ignore[misc]
        except FileNotFoundError:  # this file system stops at the first one that is gone
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    retrying(lambda fs=fs, path=path: fs.rm_file(path), path)  # type: ignore[misc]


def sync_folder(path: str) -> None:
    """Make renames inside a local folder (or a file's bytes) survive a power loss."""
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(url: str) -> None:
    """Delete a folder and all that is in it; nothing there is fine."""
    if is_local(url):
        shutil.rmtree(local_path(url), ignore_errors=True)
    elif exists(url):
        fs, path = _file_system(url)
        with contextlib.suppress(FileNotFoundError):
            retrying(lambda: fs.rm(path, recursive=True), url)


def upload(path: str, url: str) -> None:
    """A local file to object storage, in parts if it is large; it appears whole or not at all."""
    fs, target = _file_system(url)
    retrying(lambda: fs.put_file(path, target), url, TRANSFER_SECONDS)


def download(url: str, path: str) -> None:
    """An object to a local file; who knows its hash checks it."""
    fs, source = _file_system(url)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    retrying(lambda: fs.get_file(source, path), url, TRANSFER_SECONDS)
