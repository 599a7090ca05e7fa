"""Calls to remote storage: transient failures are tried again, and what is final is said in words a user can act on.

The client itself tries again for a while before it reports anything, and a frozen server answers nothing at all: a
thread says which call has been waiting, while it waits.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from lacuna.basics.errors import AccessDenied, Unreachable, UserError

T = TypeVar("T")
log = logging.getLogger("lacuna")
_QUIET_SECONDS = 30.0
_last_said = [-_QUIET_SECONDS]  # an outage of a thousand files is one line now and then
ATTEMPTS = 6
PATIENCE_SECONDS = 8.0  # for an answer, before it is said that there is none
TRANSFER_SECONDS = 60.0  # the same for a whole file, which may be large
_FIRST_WAIT_SECONDS = 0.1
_PASSING_STATUS = (408, 425, 429)
# Answers that no retry will change.
_FINAL_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, UserError)
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "InvalidConfigError")
_CLIENT_MODULES = {"aiohttp", "aiobotocore", "botocore", "urllib3", "asyncio", "http"}


# The client drops the futures of requests that it gave up: what they say was said, or does not matter.
logging.getLogger("asyncio").addFilter(lambda record: "exception was never retrieved" not in record.getMessage())


def retrying(call: Callable[[], T], where: str, patience: float | None = None) -> T:
    """Run a remote call; transient errors are tried again with exponential backoff and jitter.

    When it is not done after `patience` seconds, that is said.
    """
    with _waits.noted(where, PATIENCE_SECONDS if patience is None else patience):
        return _retrying(call, where)


def _retrying(call: Callable[[], T], where: str) -> T:
    for attempt in range(ATTEMPTS):
        try:
            return call()
        except _FINAL_ERRORS:
            raise
        except Exception as error:
            if _is_taken(error):
                raise FileExistsError(where) from error
            # s3fs maps what it knows to OSError; connection errors of the HTTP client are not OSErrors.
            transient = isinstance(error, OSError) or type(error).__module__.split(".")[0] in _CLIENT_MODULES
            status = getattr(error, "status", None)  # of aiohttp: 401 or 403 will not change, 429 and 5xx may
            if isinstance(error, PermissionError) or status in (401, 403) or type(error).__name__ in _NO_CREDENTIALS:
                raise _denied(where, error) from error
            refused = isinstance(status, int) and 400 <= status < 500 and status not in _PASSING_STATUS
            if not transient or refused:
                raise
            if attempt == ATTEMPTS - 1:
                raise Unreachable(f"{where}: failed {ATTEMPTS} times, the last time with {type(error).__name__}: "
                                  f"{error}. Check the network and the service (for s3:// also AWS_ENDPOINT_URL), "
                                  "then start again.") from error
            if attempt == 0:
                _say(where, error)
            time.sleep(_FIRST_WAIT_SECONDS * 2**attempt * (0.5 + random.random()))
    raise AssertionError("unreachable")


def _say(where: str, error: Exception) -> None:
    """The client has tried for seconds by now, and it may be a minute until all attempts have failed."""
    _warn(f"{where}: {f'{type(error).__name__} {error}'.strip()}; trying again")


def _warn(text: str) -> None:
    if time.monotonic() - _last_said[0] >= _QUIET_SECONDS:
        _last_said[0] = time.monotonic()
        log.warning("%s", text)


class _Waits:
    """The calls that are under way, and the thread that looks at them."""

    def __init__(self) -> None:
        self.calls: dict[int, tuple[str, float, float]] = {}  # where, when it began, how long it may take
        self.numbers = itertools.count()
        self.thread: threading.Thread | None = None

    @contextlib.contextmanager
    def noted(self, where: str, patience: float) -> Iterator[None]:
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self._watch, name="storage-waits", daemon=True)
            self.thread.start()
        number = next(self.numbers)
        self.calls[number] = (where, time.monotonic(), patience)
        try:
            yield
        finally:
            del self.calls[number]

    def _watch(self) -> None:
        while True:
            time.sleep(1)
            for where, began, patience in list(self.calls.values()):
                waited = time.monotonic() - began
                if waited > patience:
                    _warn(f"{where}: not done after {waited:.0f} s, the storage is slow or does not answer; still "
                          "waiting")


_waits = _Waits()


def _is_taken(error: Exception) -> bool:
    """S3's answer to a conditional PUT when the object is there; s3fs makes a plain OSError of it."""
    answer = getattr(error.__cause__, "response", None)
    return isinstance(answer, dict) and answer.get("Error", {}).get("Code") in ("PreconditionFailed", "412")


def _denied(where: str, error: Exception) -> AccessDenied:
    """Names where credentials come from, never what they are."""
    return AccessDenied(f"{where}: the storage refuses access ({error or type(error).__name__}). Check the credentials "
                        "(for s3:// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the machine's role) "
                        "and that they may read and write there.")
