"""Inputs for the fuzz tests: damaged copies of valid files, and a check that they end in a documented error in time.

Input `number` of a target is a pure function of both, so that a failure can be seen again (many_inputs.py makes as many
as wanted).
"""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

SECONDS_PER_INPUT = 60
SHORT = 120  # inputs per target in every test run
Inputs = Callable[[random.Random], bytes]
Targets = dict[str, tuple[Inputs, Callable[[bytes], object]]]
Errors = tuple[type[Exception], ...]

_LEAVES: list[Any] = [None, True, False, *range(-3, 4), 2**31, -(2**63), 10**30, 1e400, -0.5, float("nan"), "", "a",
                      "ä\U0001f600", "../x", "/etc/passwd", "a/b", "\0", "1e999", "shard-00000.tar", "unknown", [], {}]


def damaged_bytes(valid: bytes) -> Inputs:
    """A valid file with some places overwritten, cut out, repeated or truncated; sometimes nothing of it."""
    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.05:
            return rng.randbytes(rng.randrange(200))
        data = bytearray(valid)
        for _ in range(rng.randint(1, 4)):
            _damage(rng, data)
        return bytes(data)

    return make


def _damage(rng: random.Random, data: bytearray) -> None:
    at, length = rng.randrange(len(data) + 1), rng.randint(1, 64)
    kind = rng.choice(("write", "bit", "cut", "repeat", "truncate", "insert"))
    if kind == "write":
        new = rng.choice((rng.randbytes(rng.randint(1, 16)), b"\0" * length, b"\xff" * rng.randint(1, 9)))
        data[at : at + len(new)] = new
    elif kind == "bit" and at < len(data):
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[at : at + length]
    elif kind == "repeat":
        data[at:at] = data[at : at + length]
    elif kind == "insert":
        data[at:at] = rng.randbytes(rng.randint(1, 16))
    elif kind == "truncate":
        del data[at:]


def damaged_json(valid: bytes) -> Inputs:
    """A valid JSON document in which some values are others, absent, or additional; sometimes damaged as bytes."""
    body, as_bytes = json.loads(valid), damaged_bytes(valid)

    def make(rng: random.Random) -> bytes:
        if rng.random() < 0.25:
            return as_bytes(rng)
        changed = body
        for _ in range(rng.randint(1, 3)):
            changed = _changed(rng, changed)
        return json.dumps(changed).encode()

    return make


def _changed(rng: random.Random, node: Any) -> Any:
    keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
    if not keys or rng.random() < 0.25:
        return _value(rng)
    node = dict(node) if isinstance(node, dict) else list(node)
    key = rng.choice(keys)
    kind = rng.choice(("deeper", "deeper", "remove", "replace"))
    if kind == "remove":
        del node[key]
    else:
        node[key] = _changed(rng, node[key]) if kind == "deeper" else _value(rng)
    return node


def _value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 2 or kind < 0.7:
        text = "".join(rng.choices("aZ0 _-.:/\"'<\n", k=rng.randrange(9)))
        return rng.choice([*_LEAVES, text])
    if kind < 0.85:
        return [_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {str(_value(rng, 3))[:4]: _value(rng, depth + 1) for _ in range(rng.randrange(4))}


def lines_of(inputs: Inputs) -> Inputs:
    """A file of such documents, one per line."""
    def make(rng: random.Random) -> bytes:
        return b"\n".join(inputs(rng).replace(b"\n", b" ") for _ in range(rng.randint(1, 4)))

    return make


def input_of(target: str, number: int, inputs: Inputs) -> bytes:
    return inputs(random.Random(f"{target}/{number}"))


def fuzz(target: str, inputs: Inputs, attempt: Callable[[bytes], object], allowed: Errors,
         numbers: Iterable[int]) -> None:
    """`attempt` must accept every input or raise an allowed error, without hanging."""
    for number in numbers:
        data = input_of(target, number, inputs)
        try:
            with _in_time(), suppress(allowed):
                attempt(data)
        except Exception as error:
            raise AssertionError(f"input {number} of {target!r}: {type(error).__name__}: {error}\n{data!r}") from error


def fuzz_all(targets: Targets, allowed: Errors, count: int = SHORT) -> None:
    for name, (inputs, attempt) in targets.items():
        fuzz(name, inputs, attempt, allowed, range(count))


class _TooLong(BaseException):
    """Not an Exception: code that swallows those must not swallow this."""


@contextmanager
def _in_time() -> Iterator[None]:
    def expired(number, frame):
        raise _TooLong

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(SECONDS_PER_INPUT)
    try:
        yield
    except _TooLong:
        raise AssertionError(f"no answer in {SECONDS_PER_INPUT} s") from None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
