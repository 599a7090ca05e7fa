"""What the operating system refuses, in one sentence that says what happened and what to do, whoever reports it how."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import shutil

_GONE = "its storage is gone or fails; see that it is mounted and sound"
_REMEDIES = {
    errno.ENOSPC: "there is no space left on its disk{free}; make room",
    errno.EFBIG: "the file would grow beyond the size that is allowed (`ulimit -f`) or possible there; raise the limit",
    errno.EDQUOT: "the disk quota is used up; make room or ask for more",
    errno.EROFS: "its file system is mounted read-only; mount it for writing, or write elsewhere",
    errno.EACCES: "user {user} may not do that there; check the owner and the permissions",
    errno.EPERM: "user {user} may not do that there; check the owner, the permissions and whether it is immutable",
    errno.EMFILE: "too many open files, the limit is {files}; raise it (`ulimit -n`) or use fewer workers",
    errno.ENFILE: "too many open files on this machine; close some programs",
    errno.EIO: _GONE, errno.ESTALE: _GONE, errno.ENOTCONN: _GONE, errno.ENODEV: _GONE, errno.ENXIO: _GONE,
    errno.EHOSTDOWN: _GONE,
    errno.ENOENT: "no such file or folder; was it removed, or is its storage no longer mounted?",
    errno.ENOTDIR: "a part of this path is a file, not a folder; check it",
    errno.EISDIR: "this is a folder, not a file; check the path",
    errno.ENAMETOOLONG: "this name is too long; choose a shorter one",
}
_SAFETENSORS = re.compile(r"Os \{ code: (\d+)")
_TORCH = ("inline_container", "PytorchStreamWriter")  # its own words for a write that failed, without the cause


def errno_of(error: BaseException) -> int | None:
    """The system's number behind an error, also of libraries that only have it in their text; None: none of ours."""
    if isinstance(error, OSError):
        return error.errno if error.errno in _REMEDIES else None
    text = str(error)
    found = _SAFETENSORS.search(text)
    if found and int(found[1]) in _REMEDIES:
        return int(found[1])
    named = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE)
    return next((code for code in named if os.strerror(code) in text), None)


def refusal(error: BaseException, where: str = "") -> str | None:
    """The sentence, without its full stop; None if the error is something else. `where`: a path, if it names none."""
    code, path = errno_of(error), str(getattr(error, "filename", None) or where)
    if code is None and any(words in str(error) for words in _TORCH):
        return f"{path + ': ' if path else ''}a file could not be written whole{_free(path)}; see that there is room"
    if code is None:
        return None
    text = _REMEDIES[code].format(free=_free(path), user=os.getuid(), files=resource.getrlimit(
        resource.RLIMIT_NOFILE)[0])
    return f"{path}: {text}" if path else text


def _free(path: str) -> str:
    """Of the nearest folder above the path that is there."""
    with contextlib.suppress(OSError, ValueError):
        folder = os.path.abspath(path or ".")
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        return f" ({shutil.disk_usage(folder).free / 1e6:,.0f} MB are free)"
    return ""
