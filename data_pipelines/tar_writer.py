"""Writes a WebDataset tar member by member and remembers where every member's bytes lie."""

from __future__ import annotations

import tarfile
from typing import BinaryIO

_BLOCK = 512


class TarWriter:
    """Plain tar members with fixed owner, mode and time, so that the same samples give the same bytes."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.position = 0

    def add(self, name: str, data: bytes) -> int:
        """Append one member; returns the offset of its first data byte."""
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(data), 0o644
        # GNU keeps a non-ASCII name readable in the member's own header, where readers compare it with the index.
        header = info.tobuf(format=tarfile.GNU_FORMAT, encoding="utf-8")
        self._write(header)
        offset = self.position
        self._write(data)
        self._write(bytes(-len(data) % _BLOCK))
        return offset

    def close(self) -> int:
        """Write the end marker; returns the size of the tar."""
        self._write(bytes(2 * _BLOCK))
        self._write(bytes(-self.position % tarfile.RECORDSIZE))
        return self.position

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self.position += len(data)
