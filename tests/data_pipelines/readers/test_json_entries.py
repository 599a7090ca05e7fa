"""Proves that streamed annotation files give what json.loads gives, in bounded memory, and that bad ones are named."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.readers import coco, json_entries, lvis
from lacuna.data_pipelines.readers.json_entries import read_entries
from tests.helpers.fuzzing import damaged_bytes, damaged_json, fuzz

_VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
                       | st.text(max_size=6), lambda inner: st.lists(inner, max_size=3)
                       | st.dictionaries(st.text(max_size=3), inner, max_size=3), max_leaves=6)
_ENTRIES = st.lists(st.dictionaries(st.text(max_size=4), _VALUES, max_size=4), max_size=4)
_SPACES = st.sampled_from([{"indent": None}, {"indent": 1}, {"separators": (",", ":")}])


@settings(max_examples=150, deadline=None)
@given(_ENTRIES, _ENTRIES, st.dictionaries(st.sampled_from(["info", "x", "ä"]), _VALUES), _SPACES, st.booleans(),
       st.integers(1, 40))
def test_equal_to_the_whole_document(tmp_path_factory, first, second, others, spaces, ascii_only, block):
    path = tmp_path_factory.mktemp("json") / "a.json"
    body = {"images": first, **others, "annotations": second}
    path.write_text(json.dumps(body, ensure_ascii=ascii_only, **spaces), encoding="utf-8", errors="replace")
    whole = json.loads(path.read_text(encoding="utf-8"))
    expected = [(key, f"{path}: {key}[{n}]", e) for key in ("images", "annotations") for n, e in enumerate(whole[key])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_entries, "_BLOCK_BYTES", block)  # values, numbers and characters cross the blocks' ends
        assert list(read_entries(str(path), ("images", "annotations"))) == expected


def test_outlines_are_dropped_and_a_mark_of_byte_order_is_skipped(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"a":\r\n[{"id": 1, "segmentation": [[1.5, 2]]}]}\r\n')
    assert list(read_entries(str(path), ("a",))) == [("a", f"{path}: a[0]", {"id": 1})]


@pytest.mark.parametrize(("text", "words"), [
    ("", "Expecting value at character 0"),
    ("[]", "has no 'a' at the top level; expected a"),
    ("{}", "has no 'a' at the top level"),
    ('{"a": 3}', "'a' is 3; expected a list of objects"),
    ('{"a": [7]}', r"a\[0\] is 7; expected an object"),
    ('{"a": [{}, {"x": 1, "x": 2}]}', "the key 'x' occurs twice in one object"),
    ('{"a": [], "a": []}', "'a' occurs twice at the top level"),
    ('{"a": [{"x": NaN}]}', "NaN is no JSON number"),
    ('{"a": [{"x": -Infinity}]}', "-Infinity is no JSON number"),
    ('{"a": [{"x": 1}, {"x"', "not valid JSON"),
    ('{"a": [{"x": 1}', "the end of the file where ',' or ']' belongs"),
    ('{"a": [{"x": 1}]', "the end of the file where ',' or '}' belongs"),
    ('{"a": [{}] "b": 1}', "found '\"' where ',' or '}' belongs, at character 11"),
    ('{"a": [{},]}', "Expecting value at character 10"),
    ('{a: 1}', "expected a key in quotes at character 1"),
    ('{"a": []} {}', "more text after the end, at character 10"),
    ('{"a": [{"x": ' + "9" * 5000 + "}]}", "not valid JSON"),
    ('{"a": ' + "[" * 200_000, "nested too deeply"),
    ('{"a": [{"x": ' + '{"x":' * 200_000, "nested too deeply"),
    ('{"a": [{"x": "\x01"}]}', "Invalid control character"),
])
def test_bad_documents(tmp_path, text, words):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        list(read_entries(str(tmp_path / "a.json"), ("a",)))
    assert str(tmp_path / "a.json") in str(caught.value)


def test_bad_files(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no such file"):
        list(read_entries(str(tmp_path / "none.json"), ("a",)))
    (tmp_path / "a.json").write_bytes(b'{"a": [{"x": "\xff"}]}')
    with pytest.raises(UserError, match="not UTF-8 text"):
        list(read_entries(str(tmp_path / "a.json"), ("a",)))
    monkeypatch.setattr(json_entries, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(json_entries, "_LARGEST_VALUE", 1000)
    (tmp_path / "a.json").write_text('{"a": [{"x": "' + "y" * 100_000 + '"}]}')
    with pytest.raises(UserError, match="Unterminated string"):
        list(read_entries(str(tmp_path / "a.json"), ("a",)))


CATEGORIES = [{"id": 1, "name": "cat"}, {"id": 2, "name": "dog"}]
COCO = {"images": [{"id": 5, "file_name": "5.jpg"}], "annotations": [{"image_id": 5, "category_id": 1}]}
LVIS = {**COCO, "images": [{"id": 5, "coco_url": "http://x/val2017/5.jpg", "neg_category_ids": [2]}]}
SEGMENTS = {**COCO, "annotations": [{"image_id": 5, "segments_info": [{"category_id": 1}]}]}


@pytest.mark.parametrize(("read", "body"), [(coco.read_instances, COCO), (coco.read_panoptic, SEGMENTS),
                                            (lvis.read, LVIS)], ids=["coco", "panoptic", "lvis"])
@pytest.mark.parametrize("damage", [damaged_json, damaged_bytes])
def test_damaged_annotation_files(tmp_path, read, body, damage):
    def attempt(data: bytes) -> None:
        (tmp_path / "a.json").write_bytes(data)
        read(str(tmp_path / "a.json"), str(tmp_path), skip_missing=True)

    inputs = damage(json.dumps({**body, "categories": CATEGORIES}).encode())
    fuzz("annotations", inputs, attempt, (UserError,), range(60))


_READ_IN_A_CHILD = """
import sys
from lacuna.basics.process_memory import peak_resident_bytes
from lacuna.data_pipelines.readers import coco
before = peak_resident_bytes()
dataset = coco.read_instances(sys.argv[1], sys.argv[2], skip_missing=True)
print(peak_resident_bytes() - before, len(dataset.skipped))
"""


def test_memory_does_not_grow_with_the_file(tmp_path):
    """json.loads takes six bytes per byte; streamed, 40 MB of annotations take a few blocks."""
    outline = json.dumps([[round(0.37 * i, 2) for i in range(600)]])
    path = tmp_path / "a.json"
    with open(path, "w") as file:
        file.write('{"images": ' + json.dumps([{"id": i, "file_name": f"{i}.jpg"} for i in range(100)]))
        file.write(', "annotations": [')
        file.write(", ".join(f'{{"image_id": {i % 90}, "category_id": 1, "segmentation": {outline}}}'
                             for i in range(10_000)))
        file.write('], "categories": ' + json.dumps(CATEGORIES) + "}")
    assert path.stat().st_size > 40e6
    found = subprocess.run([sys.executable, "-c", _READ_IN_A_CHILD, str(path), str(tmp_path)], capture_output=True,
                           text=True, check=True).stdout.split()
    assert int(found[1]) == 100
    assert int(found[0]) < path.stat().st_size / 2
