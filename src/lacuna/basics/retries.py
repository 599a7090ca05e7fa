"""Calls to remote storage: transient failures are tried again, and what is final is said in words a user can act on."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from lacuna.basics.errors import AccessDenied, Unreachable, UserError

T = TypeVar("T")
log = logging.getLogger("lacuna")
_QUIET_SECONDS = 30.0
_last_said = [-_QUIET_SECONDS]  # an outage of a thousand files is one line now and then
ATTEMPTS = 6
_FIRST_WAIT_SECONDS = 0.1
_PASSING_STATUS = (408, 425, 429)
# Answers that no retry will change.
_FINAL_ERRORS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, UserError)
_NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "InvalidConfigError")
_CLIENT_MODULES = {"aiohttp", "aiobotocore", "botocore", "urllib3", "asyncio", "http"}


def retrying(call: Callable[[], T], where: str) -> T:
    """Run a remote call; transient errors are tried again with exponential backoff and jitter."""
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
    if time.monotonic() - _last_said[0] >= _QUIET_SECONDS:
        _last_said[0] = time.monotonic()
        log.warning("%s: %s; trying again", where, f"{type(error).__name__} {error}".strip())


def _is_taken(error: Exception) -> bool:
    """S3's answer to a conditional PUT when the object is there; s3fs makes a plain OSError of it."""
    answer = getattr(error.__cause__, "response", None)
    return isinstance(answer, dict) and answer.get("Error", {}).get("Code") in ("PreconditionFailed", "412")


def _denied(where: str, error: Exception) -> AccessDenied:
    """Names where credentials come from, never what they are."""
    return AccessDenied(f"{where}: the storage refuses access ({error or type(error).__name__}). Check the credentials "
                        "(for s3:// AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the machine's role) "
                        "and that they may read and write there.")
