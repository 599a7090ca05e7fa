"""Inputs for the fuzz tests: damaged copies of valid files, and a check that they end in a documented error in time."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

SECONDS_PER_INPUT = 10
SHORT, LONG = 120, 12_000  # inputs a target
Targets = dict[str, tuple[st.SearchStrategy[bytes], Callable[[bytes], object]]]

_LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([2**31, -(2**63), 10**30, 1e400, -0.5, float("nan")]),
    st.text(max_size=8), st.sampled_from(["../x", "/etc/passwd", "a/b", "\0", "1e999", "shard-00000.tar", "unknown"]))
json_values = st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
    st.text(max_size=4), inner, max_size=3), max_leaves=5)


@st.composite
def damaged_bytes(draw: st.DrawFn, valid: bytes) -> bytes:
    """A valid file with some places overwritten, cut out, repeated or truncated; sometimes nothing of it."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.binary(max_size=200))
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["write", "cut", "repeat", "truncate", "insert"]))
        length = draw(st.integers(1, 64))
        if kind == "write":
            new = draw(st.binary(min_size=1, max_size=16))
            data[at : at + len(new)] = new
        elif kind == "cut":
            del data[at : at + length]
        elif kind == "repeat":
            data[at:at] = data[at : at + length]
        elif kind == "insert":
            data[at:at] = draw(st.binary(max_size=16))
        else:
            del data[at:]
    return bytes(data)


@st.composite
def damaged_json(draw: st.DrawFn, valid: bytes) -> bytes:
    """A valid JSON document in which some values are others, absent, or additional; sometimes damaged as bytes."""
    if draw(st.integers(0, 3)) == 0:
        return draw(damaged_bytes(valid))
    body = json.loads(valid)
    for _ in range(draw(st.integers(1, 3))):
        body = _changed(draw, body)
    return json.dumps(body).encode()


def _changed(draw: st.DrawFn, node: Any) -> Any:
    keys = list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
    if not keys or draw(st.integers(0, 3)) == 0:
        return draw(json_values)
    node = dict(node) if isinstance(node, dict) else list(node)
    key = draw(st.sampled_from(keys))
    kind = draw(st.sampled_from(["deeper", "deeper", "remove", "replace"]))
    if kind == "remove":
        del node[key]
    else:
        node[key] = _changed(draw, node[key]) if kind == "deeper" else draw(json_values)
    return node


def fuzz(inputs: st.SearchStrategy[bytes], attempt: Callable[[bytes], object], allowed: tuple[type[Exception], ...],
         count: int) -> None:
    """`attempt` must accept every input or raise an allowed error, without hanging."""

    @settings(max_examples=count, deadline=None, database=None, derandomize=count == SHORT,
              suppress_health_check=list(HealthCheck))
    @given(inputs)
    def check(data: bytes) -> None:
        with _in_time(), suppress(allowed):
            attempt(data)

    check()


def fuzz_all(targets: Targets, names: list[str], allowed: tuple[type[Exception], ...], count: int = SHORT) -> None:
    """A few inputs of every target; `names` are all of them, since the long forms are listed by name."""
    assert list(targets) == names
    for inputs, attempt in targets.values():
        fuzz(inputs, attempt, allowed, count)


@contextmanager
def _in_time() -> Iterator[None]:
    def expired(number, frame):
        raise AssertionError(f"no answer in {SECONDS_PER_INPUT} s")

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(SECONDS_PER_INPUT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
