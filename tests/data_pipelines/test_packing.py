"""Proves that packed shards are valid WebDatasets with every file once, laid out as promised, whole or not at all."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.encoding import with_rotation
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.labels import SparseLabels
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import folder
from lacuna.data_pipelines.readers.base import Dataset, Sample
from tests.helpers.pictures import picture, write_pictures

NAMES = [f"{kind}/{number:02d}.{form}" for kind in ("ant", "bee", "Ünï cörn") for number in range(12)
         for form in (("jpg", "png")[number % 2],)]


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("images"), [*NAMES, "ant/" + "long" * 30 + ".jpg"])


@pytest.fixture(scope="module")
def packed(images, tmp_path_factory) -> ShardIndex:
    out = tmp_path_factory.mktemp("packed") / "out"
    return pack(folder.read(str(images)), str(out), Layout(streams=4, rows_per_shard=8), workers=3)


def test_webdataset_reads_back_every_file_unchanged(images, packed):
    tars = [packed.shard_url(s) for s in range(len(packed.shards))]
    found = {}
    for sample in webdataset.WebDataset(tars, shardshuffle=False):
        extension = next(k for k in sample if not k.startswith("__"))
        found[f"{sample['__key__']}.{extension}"] = sample[extension]
    expected = {str(p.relative_to(images)): p.read_bytes() for p in images.rglob("*") if p.is_file()}
    assert found == expected


def test_member_tables_point_at_the_bytes(images, packed):
    dataset = folder.read(str(images))
    sidecar = Sidecar.load(packed, "labels")
    positions = []
    for shard in range(len(packed.shards)):
        tar, members, labels = storage.read_bytes(packed.shard_url(shard)), packed.members(shard), sidecar.labels(shard)
        assert len(tar) == packed.shards[shard].bytes
        for row, key in enumerate(members.keys):
            offset, size = int(members.offsets[row]), int(members.sizes[row])
            assert tar[offset : offset + size] == (images / f"{key}.{members.extensions[row]}").read_bytes()
            name = f"{key}.{members.extensions[row]}".encode()[:99]
            assert tar[offset - 512 : offset].startswith(name), "the member's own header carries its name"
            source = dataset.samples[members.positions[row]]
            assert source.key == key
            assert labels.positives(row).tolist() == dataset.labels.positives(int(members.positions[row])).tolist()
        positions += members.positions.tolist()
    assert sorted(positions) == list(range(len(dataset.samples)))
    assert positions != sorted(positions), "globally shuffled"


def test_shards_are_even_and_a_multiple_of_streams(packed):
    assert len(packed.shards) == 8
    assert packed.counts.max() - packed.counts.min() <= 1
    assert packed.samples == 37


@pytest.mark.parametrize(("samples", "mean", "layout", "shards"), [
    (1_281_167, 110e3, Layout(), 1104),  # ImageNet: 128 MB a tar
    (82_081, 160e3, Layout(), 160),  # COCO: MIN_ROWS a shard rather than 256 tiny shards
    (50_000, 8e3, Layout(), 112),
    (9_000_000, 8e3, Layout(), 1104),  # MAX_ROWS
    (5_717, 100e3, Layout(), 16),
    (10, 100e3, Layout(), 10), (17, 1e3, Layout(), 16), (1, 1.0, Layout(), 1),
    (100, 1e3, Layout(streams=3, rows_per_shard=10), 12),
    (100, 50e6, Layout(streams=4), 52),
])
def test_shard_count(samples, mean, layout, shards):
    count = layout.shard_count(samples, mean)
    assert count == shards
    if layout.rows_per_shard is None and samples > layout.streams and count * 2 <= samples:
        assert np.ceil(samples / count) * mean <= layout.shard_mb * 1e6


def test_same_seed_same_bytes(images, packed, tmp_path):
    again = pack(folder.read(str(images)), str(tmp_path / "a"), Layout(streams=4, rows_per_shard=8), workers=1)
    assert [storage.read_bytes(again.shard_url(s)) for s in range(8)] == \
           [storage.read_bytes(packed.shard_url(s)) for s in range(8)]
    other = pack(folder.read(str(images)), str(tmp_path / "b"), Layout(streams=4, rows_per_shard=8, seed=1))
    assert other.fingerprint != packed.fingerprint
    plain = pack(folder.read(str(images)), str(tmp_path / "c"), Layout(streams=4, rows_per_shard=8, shuffle=False))
    assert plain.members(0).positions.tolist() == list(range(5))


def test_resize_makes_upright_small_jpegs(tmp_path):
    root = write_pictures(tmp_path / "in", ["a/1.png"])
    (root / "a/2.jpg").write_bytes(with_rotation(picture(1, (64, 32)), 90))
    buffer = io.BytesIO()
    Image.fromarray(np.full((40, 50), 40_000, np.uint16)).save(buffer, "PNG")
    (root / "a/3.png").write_bytes(buffer.getvalue())
    index = pack(folder.read(str(root)), str(tmp_path / "out"), Layout(streams=1), resize=20)
    members, tar = index.members(0), storage.read_bytes(index.shard_url(0))
    shown = {}
    for key, offset, size in zip(members.keys, members.offsets, members.sizes, strict=True):
        image = Image.open(io.BytesIO(tar[offset : offset + size]))
        shown[key] = (image.format, image.mode, image.size, image.getpixel((5, 5)))
    assert shown["a/1"][:3] == ("JPEG", "RGB", (24, 16)), "never enlarged"
    assert shown["a/2"][:3] == ("JPEG", "RGB", (20, 40))
    assert shown["a/3"][2] == (25, 20)
    assert abs(shown["a/3"][3][0] - 40_000 // 256) <= 2
    assert set(members.extensions) == {"jpg"}


def test_finished_output_is_refused_then_overwritten(images, tmp_path):
    out = str(tmp_path / "out")
    first = pack(folder.read(str(images)), out, Layout(streams=1, rows_per_shard=4))
    with pytest.raises(UserError, match="--overwrite"):
        pack(folder.read(str(images)), out, Layout())
    assert ShardIndex.load(out) == first
    second = pack(folder.read(str(images)), out, Layout(streams=1, rows_per_shard=20), overwrite=True)
    assert len(ShardIndex.load(out).shards) == len(second.shards) == 2
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert len([n for n in os.listdir(out) if n.endswith(".tar")]) == 2


def test_foreign_folder_is_left_alone(images, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"not empty.*thesis\.tex"):
        pack(folder.read(str(images)), str(tmp_path), Layout(), overwrite=True)
    assert (tmp_path / "thesis.tex").exists()


def test_linked_output_is_written_where_the_link_points(images, tmp_path):
    (tmp_path / "big disk").mkdir()
    (tmp_path / "big disk" / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "big disk" / "target")
    index = pack(folder.read(str(images)), str(tmp_path / "link"), Layout())
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "big disk/target/index.json").exists()
    assert index.samples == 37


def test_output_that_cannot_be_created(images):
    with pytest.raises(UserError, match=r"--out /proc/x: cannot create /proc/x\.partial"):
        pack(folder.read(str(images)), "/proc/x", Layout())


def test_killed_make_leaves_nothing_that_looks_complete(images, tmp_path):
    """SIGKILL while shards are written; the next make simply works."""
    script = textwrap.dedent("""
        import sys, time
        from lacuna.data_pipelines import packing
        from lacuna.data_pipelines.readers import folder
        def slow(rows):
            print("shard", flush=True)
            time.sleep(60)
        packing.pack(folder.read(sys.argv[1]), sys.argv[2], packing.Layout(streams=1, rows_per_shard=2), workers=1,
                     advance=slow)
    """)
    out = tmp_path / "out"
    child = subprocess.Popen([sys.executable, "-c", script, str(images), str(out)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"shard\n"
    with pytest.raises(UserError, match="another `lacuna shards make`"):
        pack(folder.read(str(images)), str(out), Layout())
    child.kill()
    child.wait()
    assert not out.exists()
    assert (tmp_path / "out.partial" / "shard-00000.tar").exists()
    index = pack(folder.read(str(images)), str(out), Layout(streams=1, rows_per_shard=20))
    assert len(index.shards) == 2
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert ".lock" not in os.listdir(out)


def test_memory_url(images):
    out = f"memory://packed-{time.time_ns()}"
    first = pack(folder.read(str(images)), out, Layout(streams=1, rows_per_shard=4))
    with pytest.raises(UserError, match="--overwrite"):
        pack(folder.read(str(images)), out, Layout())
    index = pack(folder.read(str(images)), out, Layout(streams=1, rows_per_shard=20), overwrite=True)
    assert len(first.shards) == 10
    assert sorted(storage.list_names(out)) == ["index.json", "labels", "members", "shard-00000.tar", "shard-00001.tar"]
    assert len(storage.list_names(storage.join(out, "members"))) == 2
    assert Sidecar.load(index, "labels").labels(0).positives(0).size == 1


def test_disk_that_is_too_small_or_fills_up(tmp_path):
    """The second case writes to a device that is always full."""
    for source in (Vast(), FillsTheDisk(tmp_path / "out.partial" / "shard-00001.tar")):
        labels = SparseLabels.from_lists([[0]] * 20, [[]] * 20)
        dataset = Dataset(["c"], [Sample(f"s{i}", source, "jpg") for i in range(20)], labels, "train")
        with pytest.raises(UserError, match=r"out\.partial: no space left: the dataset needs about [\d,]{6,} bytes"):
            pack(dataset, str(tmp_path / "out"), Layout(streams=1, rows_per_shard=10), workers=1)
        assert os.listdir(tmp_path) == []


class FillsTheDisk:
    def __init__(self, tar: Path):
        self.tar = tar

    def read(self):
        if not self.tar.exists():
            with contextlib.suppress(FileExistsError):  # another probe's thread was first
                self.tar.symlink_to("/dev/full")
        return bytes(200_000)


class Vast:
    """Claims petabytes without having them."""

    def read(self):
        return VastBytes()


class VastBytes(bytes):
    def __len__(self):
        return 10**15


def test_bad_datasets(images, tmp_path):
    good = folder.read(str(images))

    def made(samples, positives, classes=("c",)):
        labels = SparseLabels.from_lists(positives, [[]] * len(positives))
        return pack(Dataset(list(classes), samples, labels, "train"), str(tmp_path / "o"), Layout())

    source = good.samples[0].source
    with pytest.raises(UserError, match="the dataset is empty"):
        made([], [])
    with pytest.raises(UserError, match="no class"):
        made([Sample("a", source, "jpg")], [[0]], ())
    with pytest.raises(UserError, match="1 keys occur more than once, first 'a'"):
        made([Sample("a", source, "jpg"), Sample("a", source, "jpg")], [[0], [0]])
    with pytest.raises(UserError, match=r"sample key '\.\./a'"):
        made([Sample("../a", source, "jpg")], [[0]])
    with pytest.raises(UserError, match=r"sample key 'a\.b'"):
        made([Sample("a.b", source, "jpg")], [[0]])
    with pytest.raises(UserError, match="row 0 has positive class id 4"):
        made([Sample("a", source, "jpg")], [[4]])
    with pytest.raises(UserError, match="cannot read /no/where"):
        made([Sample("a", "/no/where", "jpg")], [[0]])
    assert os.listdir(tmp_path) == []
