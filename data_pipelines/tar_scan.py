"""Walks the members of a tar in order, local or remote, without unpacking anything."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lacuna.basics import storage
from lacuna.basics.errors import UserError

# WebDataset cuts a name at the first dot of its last part; what follows is the extension.
_KEY_AND_EXTENSION = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]*)", re.DOTALL)


class _Info(tarfile.TarInfo):
    """Refuses sizes below zero, on which Python's reader (before 3.11.14) would walk the same header for ever."""

    def _block(self, count: int) -> int:
        if count < 0:
            raise tarfile.ReadError("a size below zero")
        return super()._block(count)  # type: ignore[misc]


@dataclass(frozen=True)
class Member:
    """A regular file in a tar; `read` works until the next member is asked for."""

    name: str  # without a leading "./"
    offset: int  # of its first data byte
    size: int
    read: Callable[[], bytes]

    def key_and_extension(self) -> tuple[str, str] | None:
        match = _KEY_AND_EXTENSION.fullmatch(self.name)
        return (match.group(1), match.group(2)) if match else None


def scan(url: str) -> Iterator[Member]:
    """Members in tar order; names that would leave the folder they are unpacked in are refused."""
    # A local tar is seekable, so that data nobody reads is skipped; a remote one is streamed once.
    mode = "r:" if storage.is_local(url) else "r|"
    try:
        with storage.open_stream(url) as stream, tarfile.open(  # type: ignore[call-overload]
                fileobj=stream, mode=mode, tarinfo=_Info) as tar:
            for info in tar:
                if info.isreg():
                    yield _member(tar, info, url)
                tar.members = []  # tarfile would keep every header
    except FileNotFoundError:
        raise UserError(f"{url}: no such file. Restore the shard.") from None
    except UserError:
        raise
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:  # of numbers in damaged headers too
        raise UserError(f"{url}: truncated or not an uncompressed tar ({error}). Copy it again, or unpack a .tar.gz to "
                        ".tar.") from None


def _member(tar: tarfile.TarFile, info: tarfile.TarInfo, url: str) -> Member:
    name = info.name.removeprefix("./")
    if name.startswith("/") or ".." in name.split("/") or "\n" in name:
        raise UserError(f"{url}: member {info.name!r} would be written outside its folder when unpacked. Do not use "
                        "this tar.")

    def read() -> bytes:
        file = tar.extractfile(info)
        assert file is not None, "regular members have content"
        try:
            return file.read()
        except tarfile.TarError:
            raise UserError(f"{url}: truncated inside member {name!r}. Copy it again.") from None

    return Member(name, info.offset_data, info.size, read)
