"""Annotation files of a gigabyte, one entry at a time: `{"images": [{…}, …], "annotations": [{…}, …], …}`.

The text is decoded block by block and each array element by the C scanner of the standard library, so that memory
holds one block and one entry, whatever the size of the file.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from lacuna.basics import storage
from lacuna.basics.errors import UserError

_BLOCK_BYTES = 1 << 20
_LARGEST_VALUE = 64 << 20  # characters; no honest entry of an annotation file comes near
_LOOK_AHEAD = 3  # `1`, `1.`, `1e-`: near the window's end, a number may go on in the next block
_SPACE = re.compile(r"[ \t\n\r]*")
_BESIDE_THE_POINT = "segmentation"  # nine tenths of an instance file, and no label


def read_entries(url: str, keys: tuple[str, ...]) -> Iterator[tuple[str, str, dict]]:
    """(key, `file: key[number]`, entry) of every element of the arrays under `keys`, in the file's order.

    The file is one JSON object that has each of the keys once; what else it has is checked and left out. Outlines of
    objects ("segmentation") are dropped.
    """
    try:
        with storage.open_stream(url) as stream:
            yield from _top_level(_Text(stream), url, keys)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise UserError(f"{url}: no such file. Check the path.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{url}: not UTF-8 text ({error}). Save it as UTF-8.") from None
    except RecursionError:
        raise UserError(f"{url}: not valid JSON (nested too deeply). Download it again.") from None
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{url}: not valid JSON ({error}). Download it again.") from None


def id_of(entry: dict, field: str, where: str, hint: str = "") -> int | str:
    """A field that identifies something; only numbers and texts do."""
    value = _field(entry, field, where, hint)
    if not isinstance(value, int | float | str):
        raise UserError(f"{where}: {field!r} is {_short(value)}; expected a number or a text.")
    return value  # type: ignore[return-value]  # a whole float equals its integer


def text_of(entry: dict, field: str, where: str, hint: str = "") -> str:
    value = _field(entry, field, where, hint)
    if not isinstance(value, str):
        raise UserError(f"{where}: {field!r} is {_short(value)}; expected a text.")
    return value


def _field(entry: dict, field: str, where: str, hint: str) -> Any:
    if field not in entry:
        raise UserError(f"{where} has no {field!r}; its keys are {sorted(entry)}. {hint}".rstrip())
    return entry[field]


def _top_level(text: _Text, url: str, keys: tuple[str, ...]) -> Iterator[tuple[str, str, dict]]:
    seen: set[str] = set()
    kind = text.skip_space()
    if kind == "{":
        for key in _keys_of_object(text):
            if key in seen:
                raise UserError(f"{url}: {key!r} occurs twice at the top level. Download it again.")
            seen.add(key)
            if text.skip_space() != "[":
                if key in keys:
                    raise UserError(f"{url}: {key!r} is {_short(text.value())}; expected a list of objects.")
                text.value()
                continue
            for number, entry in enumerate(_elements(text)):
                if key in keys:
                    where = f"{url}: {key}[{number}]"
                    if not isinstance(entry, dict):
                        raise UserError(f"{where} is {_short(entry)}; expected an object.")
                    yield key, where, entry
    else:
        text.value()
    if text.skip_space():
        raise ValueError(f"more text after the end, at character {text.position}")
    absent = [key for key in keys if key not in seen]
    if absent:
        raise UserError(f"{url}: has no {', '.join(map(repr, absent))} at the top level; expected {', '.join(keys)}. "
                        "Is it the right annotation file?")


def _keys_of_object(text: _Text) -> Iterator[str]:
    """Keys of the object that starts here; the caller reads each value before it asks for the next key."""
    text.take("{")
    if text.skip_space() == "}":
        text.take("}")
        return
    while True:
        if text.skip_space() != '"':
            raise ValueError(f"expected a key in quotes at character {text.position}")
        key = text.value()
        text.take(":")
        yield key
        if text.take(",}") == "}":
            return


def _elements(text: _Text) -> Iterator[Any]:
    text.take("[")
    if text.skip_space() == "]":
        text.take("]")
        return
    while True:
        yield text.value()
        if text.take(",]") == "]":
            return


class _Text:
    """A window on the text of the stream: what was read is forgotten, more is fetched when a value is not yet whole."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self._decode = codecs.getincrementaldecoder("utf-8-sig")().decode
        self._decoder = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_refuse_constant)
        self._window, self._at, self._before, self._ended = "", 0, 0, False

    @property
    def position(self) -> int:
        """Characters before the place that is read next."""
        return self._before + self._at

    def skip_space(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            found = _SPACE.match(self._window, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._window):
                return self._window[self._at]
            if self._ended:
                return ""
            self._fetch(_BLOCK_BYTES)

    def take(self, legal: str) -> str:
        """The next character that is no white space, which must be one of `legal`."""
        found = self.skip_space()
        if not found or found not in legal:
            what = repr(found) if found else "the end of the file"
            raise ValueError(f"found {what} where {' or '.join(map(repr, legal))} belongs, at character "
                             f"{self.position}; the file is damaged or not whole")
        self._at += 1
        return found

    def value(self) -> Any:
        """The JSON value that starts here."""
        self.skip_space()
        wanted = _BLOCK_BYTES
        while True:
            problem = ""
            try:
                value, end = self._decoder.raw_decode(self._window, self._at)
                if end + _LOOK_AHEAD <= len(self._window) or self._ended:
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                problem = f"{error.msg} at character {self._before + error.pos}"
            if self._ended:
                raise ValueError(problem)
            if len(self._window) - self._at > _LARGEST_VALUE:
                raise ValueError(problem or f"a value of more than {_LARGEST_VALUE:,} characters at {self.position}")
            self._fetch(wanted)
            wanted *= 2  # so that a value of n blocks is scanned log n times

    def _fetch(self, size: int) -> None:
        data = self._stream.read(size)
        self._ended = not data
        self._before += self._at
        self._window, self._at = self._window[self._at:] + self._decode(data, final=self._ended), 0


def _object(pairs: list[tuple[str, Any]]) -> dict:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(n for n in names if names.count(n) > 1)!r} occurs twice in one object")
    found.pop(_BESIDE_THE_POINT, None)
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _short(value: Any) -> str:
    return f"{value!r:.60}"
