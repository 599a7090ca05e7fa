"""Proves that OpenImages CSVs become ternary labels per image, and that every row left out is accounted for."""

from __future__ import annotations

import io
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image, ImageOps

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.encoding import with_rotation
from lacuna.data_pipelines.labels import NEGATIVE, POSITIVE, UNKNOWN
from lacuna.data_pipelines.packing import Layout, pack, read_source
from lacuna.data_pipelines.readers import openimages
from lacuna.data_pipelines.readers.openimages.folders import NOWHERE
from lacuna.data_pipelines.readers.openimages.label_rows import LabelRows
from tests.helpers.pictures import picture, write_pictures

A, B, C, D = "000002b66c9c498e", "000002b97e5471a0", "0000037d1cb9e4f5", "ffffffffffffffff"
HEADER = "ImageID,Source,LabelName,Confidence\n"
ROWS = [(B, "verification", "/m/2", 1), (A, "crowdsource-verification", "/m/1", 1), (A, "verification", "/m/2", 0),
        (B, "machine", "/m/1", 0.9), (D, "verification", "/m/1", 1), (A, "verification", "/m/other", 1),
        (B, "verification", "/m/3", 1), (B, "crowdsource-verification", "/m/3", 0), (C, "machine", "/m/3", 0.4)]


@pytest.fixture
def paths(tmp_path):
    write_pictures(tmp_path / "images", [f"{i}.jpg" for i in (A, B, C)])
    (tmp_path / "labels.csv").write_text(HEADER + "".join(f"{i},{s},{m},{c}\n" for i, s, m, c in ROWS))
    (tmp_path / "classes.csv").write_text('LabelName,DisplayName\n/m/1,Cat\n/m/2,"Dog, big"\n/m/3,Ox\n')
    return {"labels": [str(tmp_path / "labels.csv")], "classes": str(tmp_path / "classes.csv"),
            "images": [str(tmp_path / "images")]}


def test_verified_labels(paths, tmp_path):
    dataset = openimages.read(**paths)
    assert dataset.classes == ["Cat", "Dog, big", "Ox"]
    assert dataset.class_ids == ["/m/1", "/m/2", "/m/3"]
    assert [s.key for s in dataset.samples] == [A, B]
    assert dataset.labels.dense(3).tolist() == [[POSITIVE, NEGATIVE, UNKNOWN], [UNKNOWN, POSITIVE, UNKNOWN]]
    assert dataset.skipped == [f"{D}.jpg\tno such file"]
    counts = {k: v for k, v in dataset.source.items() if isinstance(v, int)}
    assert counts == {"rows_read": 9, "rows_of_other_classes": 1, "rows_of_machines_left_out": 2,
                      "contradictions_left_unknown": 1, "images_missing": 1}
    index = pack(dataset, str(tmp_path / "out"), Layout(streams=1))
    assert (tmp_path / "out" / "skipped.txt").read_text() == f"{D}.jpg\tno such file\n"
    assert sorted(index.members(0).positions.tolist()) == [0, 1]


def test_images_in_several_folders(paths, tmp_path):
    write_pictures(tmp_path / "more", [f"{D}.jpg"])
    dataset = openimages.read(**{**paths, "images": [*paths["images"], str(tmp_path / "more")]})
    assert [s.source for s in dataset.samples] == [f"{tmp_path}/images/{A}.jpg", f"{tmp_path}/images/{B}.jpg",
                                                   f"{tmp_path}/more/{D}.jpg"]
    assert dataset.skipped == []


def test_class_list_header_and_machine_rows(paths, tmp_path):
    (tmp_path / "plain.csv").write_text("/m/1,Cat\n/m/2,Dog\n/m/3,Ox\n")
    (tmp_path / "trainable.txt").write_text("/m/3\n/m/1\n")
    dataset = openimages.read(**{**paths, "classes": str(tmp_path / "plain.csv")},
                              class_list=str(tmp_path / "trainable.txt"), machine_confidence=0.5)
    assert dataset.classes == ["Ox", "Cat"]
    assert [s.key for s in dataset.samples] == [A, B]
    assert dataset.labels.dense(2).tolist() == [[UNKNOWN, POSITIVE], [UNKNOWN, POSITIVE]]


def test_humans_overrule_machines(paths):
    """Most verified negatives are machine proposals that a human rejected."""
    with open(paths["labels"][0], "a") as file:
        file.write(f"{A},machine,/m/2,0.9\n{B},machine,/m/3,0.9\n{A},machine,/m/3,0.9\n")
    dataset = openimages.read(**paths, machine_confidence=0.5)
    assert dataset.labels.dense(3).tolist() == [[POSITIVE, NEGATIVE, POSITIVE], [POSITIVE, POSITIVE, UNKNOWN]]
    assert dataset.source["contradictions_left_unknown"] == 1


def test_rotation_tags_the_jpeg_without_touching_pixels(paths, tmp_path):
    (tmp_path / "images.csv").write_text(
        "ImageID,Subset,OriginalURL,Title,Rotation\n" + f'{A},train,http://x,"a, ""b""",90.0\n{B},train,http://x,t,\n')
    dataset = openimages.read(**paths, images_csv=str(tmp_path / "images.csv"))
    original = (tmp_path / "images" / f"{A}.jpg").read_bytes()
    turned = read_source(dataset.samples[0])
    assert read_source(dataset.samples[1]) == (tmp_path / "images" / f"{B}.jpg").read_bytes()
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(turned)))
    expected = Image.open(io.BytesIO(original)).transpose(Image.Transpose.ROTATE_90)
    assert np.array_equal(np.asarray(upright), np.asarray(expected))


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_rotation_replaces_an_earlier_orientation(degrees):
    once = with_rotation(picture(3), 90)
    again = Image.open(io.BytesIO(with_rotation(once, degrees)))
    turn = Image.Transpose[f"ROTATE_{degrees}"]
    expected = Image.open(io.BytesIO(picture(3))).transpose(turn)
    assert np.array_equal(np.asarray(ImageOps.exif_transpose(again)), np.asarray(expected))


@pytest.mark.parametrize(("row", "words"), [
    (f"{A},verification,/m/1,0.5\n", f"image {A} has a human label with confidence 0.5"),
    ("00zz,verification,/m/1,1\n", "ImageID '00zz' is not 16"),
    ("zzzzzzzzzzzzzzzz,verification,/m/1,1\n", "ImageID 'zzzzzzzzzzzzzzzz' is not 16"),
    (f"{A},verification,/m/1,yes\n", "Confidence is not a number"),
    (f"{A},verification\n", "not a CSV with the columns"),
])
def test_bad_rows(paths, row, words):
    with open(paths["labels"][0], "a") as file:
        file.write(row)
    with pytest.raises(UserError, match=words):
        openimages.read(**paths)


def test_other_bad_inputs(paths, tmp_path):
    (tmp_path / "bad.csv").write_text("Image,Label\nx,y\n")
    with pytest.raises(UserError, match="not a CSV with the columns"):
        openimages.read(**{**paths, "labels": [str(tmp_path / "bad.csv")]})
    with pytest.raises(UserError, match="no such file"):
        openimages.read(**{**paths, "labels": [str(tmp_path / "none.csv")]})
    with pytest.raises(UserError, match=r"bad\.csv:1"):
        openimages.read(**{**paths, "classes": str(tmp_path / "bad.csv")})
    with pytest.raises(UserError, match="no such folder"):
        openimages.read(**{**paths, "images": [str(tmp_path / "none")]})


def test_equal_to_a_plain_dict(paths):
    """300,000 rows, unsorted, over all parts; humans and machines contradict themselves and each other."""
    rng = np.random.RandomState(0)
    pool = rng.randint(0, 2**63, 20_000, dtype=np.uint64) * np.uint64(2)
    images, classes, values, by_human = (rng.choice(pool, 300_000), rng.randint(0, 3, 300_000),
                                         rng.randint(0, 2, 300_000), rng.rand(300_000) < 0.3)
    with open(paths["labels"][0], "w") as file:
        file.write(HEADER)
        file.writelines(f"{i:016x},{'verification' if h else 'machine'},/m/{c + 1},{v if h else 0.9}\n"
                        for i, c, v, h in zip(images.tolist(), classes, values, by_human, strict=True))
    found = LabelRows(3)
    found.add_files(paths["labels"], ["/m/1", "/m/2", "/m/3"], 0.5)
    present = np.sort(pool)[::2]
    grouped = found.group(lambda part, ids: np.where(np.isin(ids, present), 7, NOWHERE).astype(np.uint16))
    answers: dict[tuple[int, int], tuple[set[int], set[int]]] = {}
    for i, c, v, h in zip(images.tolist(), classes.tolist(), values.tolist(), by_human.tolist(), strict=True):
        answers.setdefault((i, c), (set(), set()))[h].add(v if h else 1)
    assert grouped.images.tolist() == sorted({i for i, _ in answers})
    kept = grouped.images[grouped.place == 7]
    assert kept.tolist() == sorted(set(present.tolist()) & {i for i, _ in answers})
    row_of = {int(i): r for r, i in enumerate(kept)}
    expected = np.full((len(kept), 3), UNKNOWN, np.int8)
    for (i, c), (machine, human) in answers.items():
        said = human or machine
        if len(said) == 1 and i in row_of:
            expected[row_of[i], c] = POSITIVE if said == {1} else NEGATIVE
    assert np.array_equal(grouped.labels.dense(3), expected)
    assert grouped.contradictions == sum(len(human) == 2 for _, human in answers.values())


def test_rows_that_do_not_count_are_explained(paths):
    def attempt(rows, **options):
        with open(paths["labels"][0], "w") as file:
            file.write(HEADER + rows)
        return openimages.read(**paths, **options)

    machines = f"{A},machine,/m/1,0.6\n{B},machine,/m/2,0.7\n"
    with pytest.raises(UserError, match=r"none of the 2 label rows counts.*2 were made by machines.*--machine-conf"):
        attempt(machines)
    with pytest.raises(UserError, match=r"less sure than --machine-confidence 0\.8\. Lower it"):
        attempt(machines, machine_confidence=0.8)
    assert [s.key for s in attempt(machines, machine_confidence=0.65).samples] == [B]
    with pytest.raises(UserError, match="1 are of classes that --classes and --class-list do not name"):
        attempt(f"{A},verification,/m/other,1\n")


def test_a_dangling_link_is_no_image(paths, tmp_path):
    os.symlink(tmp_path / "gone", tmp_path / "images" / f"{D}.jpg")
    assert [s.key for s in openimages.read(**paths).samples] == [A, B]


class Web(BaseHTTPRequestHandler):
    """Answers for the files of `folder`, and remembers what was asked."""

    folder = ""
    asked: ClassVar[list[str]] = []

    def do_HEAD(self):
        type(self).asked.append(self.path)
        self.send_response(200 if os.path.exists(self.folder + self.path) else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *args):
        pass


def test_a_listing_over_http_goes_on_where_it_stopped(paths, tmp_path):
    Web.folder, Web.asked = str(tmp_path / "images"), []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        options = {**paths, "images": [f"http://127.0.0.1:{server.server_port}"], "listing": str(tmp_path / "parts")}
        first = openimages.read(**options)
        assert [s.key for s in first.samples] == [A, B] == [s.key for s in openimages.read(**paths).samples]
        assert first.skipped == [f"{D}.jpg\tno such file"]
        assert len(list((tmp_path / "parts").iterdir())) == 2, "one for 00…, one for ff…"
        asked = len(Web.asked)
        again = openimages.read(**options)
        assert len(Web.asked) == asked, "nothing was asked twice"
        assert [s.source for s in again.samples] == [s.source for s in first.samples]
        for path in (tmp_path / "parts").iterdir():
            path.write_bytes(b"torn")
        with pytest.raises(UserError, match=r"not a part of a listing.*Remove the file"):
            openimages.read(**options)
    finally:
        server.shutdown()
        server.server_close()


def test_a_listing_of_object_storage_goes_on_where_it_stopped(paths, tmp_path, s3):
    bucket = f"s3://bucket/{tmp_path.name}"
    for name in (A, B, C):
        storage.write_atomic(f"{bucket}/{name}.jpg", (tmp_path / "images" / f"{name}.jpg").read_bytes())
    options = {**paths, "images": [bucket], "listing": str(tmp_path / "parts")}
    first = openimages.read(**options)
    assert [(s.key, s.source) for s in first.samples] == [(i, f"{bucket}/{i}.jpg") for i in (A, B)]
    parts = sorted((tmp_path / "parts").iterdir())
    assert len(parts) == 256
    storage.write_atomic(f"{bucket}/{D}.jpg", b"x")
    assert [s.key for s in openimages.read(**options).samples] == [A, B], "kept parts are not listed again"
    for path in parts:
        if np.load(path).size == 0:
            path.unlink()  # as if the listing had been stopped: what is left of it counts, the rest is listed
    assert [s.key for s in openimages.read(**options).samples] == [A, B, D]
    del options["listing"]
    assert [s.key for s in openimages.read(**options).samples] == [A, B, D]
