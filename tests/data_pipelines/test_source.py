"""Proves that opened shards give the bytes and labels of the index, local or remote, and name what does not fit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import shutil
import tarfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import numpy as np
import pytest

from lacuna.basics import storage
from lacuna.basics.errors import UserError
from lacuna.data_pipelines.index import ShardIndex
from lacuna.data_pipelines.indexing import IndexOptions, index_tars
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.subsets import Subset


@pytest.fixture
def val(digit_shards, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(digit_shards / "val", tmp_path / "val"))


def load(url: str | Path, subset: str | None = None, scratch: str | None = None) -> ShardSource:
    return ShardSource.load(str(url), "labels", subset, scratch)


def tar_members(path: Path) -> list[bytes]:
    with tarfile.open(path) as tar:
        return [tar.extractfile(member).read() for member in tar]  # type: ignore[union-attr]


def assert_same_bytes(source: ShardSource, folder: Path) -> None:
    for number, shard in enumerate(source.index.shards):
        opened = source.open(number)
        assert [opened.read(row) for row in range(shard.count)] == tar_members(folder / shard.name)
        assert opened.used.tolist() == list(range(shard.count))


class Server:
    """A loopback file server that can cut bodies short, refuse requests and count them."""

    def __init__(self, folder: Path):
        self.cut_bodies = 0  # how many of the next tar bodies end half way
        self.status: int | None = None
        self.requests: list[str] = []
        server = self

        class Handler(SimpleHTTPRequestHandler):
            def do_GET(self):
                server.requests.append(self.path)
                if server.status:
                    self.send_error(server.status)
                    return
                super().do_GET()

            def copyfile(self, source, outputfile):
                if server.cut_bodies and self.path.endswith(".tar"):
                    server.cut_bodies -= 1
                    outputfile.write(source.read()[: os.fstat(source.fileno()).st_size // 2])
                    self.close_connection = True
                    return
                shutil.copyfileobj(source, outputfile)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.05,))
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(val):
    with contextlib.closing(Server(val)) as running:
        yield running


def test_local_shards(val):
    assert_same_bytes(load(val), val)


def test_http_and_memory_shards_without_a_trace_in_scratch(val, server, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    assert_same_bytes(load(server.url, scratch=str(scratch)), val)
    memory = fsspec.filesystem("memory")
    memory.put(str(val), "/test-source", recursive=True)
    source = load("memory://test-source", scratch=str(scratch))
    assert_same_bytes(source, val)
    opened = source.open(0)
    assert list(scratch.iterdir()) == []
    assert Path(os.readlink(f"/proc/self/fd/{opened.descriptor}")).parent == scratch
    memory.rm("/test-source", recursive=True)


def test_descriptors_are_closed_with_the_shard(val, server):
    def holders(inode: int) -> int:
        links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
        return sum(os.stat(link).st_ino == inode for link in links if os.path.exists(link))

    for url in (val, server.url):
        opened = load(url).open(0)
        inode = os.fstat(opened.descriptor).st_ino
        assert Path(f"/proc/self/fd/{opened.descriptor}").exists()
        del opened
        gc.collect()
        assert holders(inode) == 0


def test_a_body_cut_short_is_fetched_again(val, server):
    source = load(server.url)
    server.cut_bodies = 2
    name = source.index.shards[0].name
    opened = source.open(0)
    assert opened.read(3) == tar_members(val / name)[3]
    assert server.requests.count("/" + name) == 3


def test_refused_requests_are_not_repeated_but_server_errors_are(val, server):
    source = load(server.url)
    server.requests.clear()
    server.status = 403
    with pytest.raises(Exception, match="403"):
        source.open(0)
    assert len(server.requests) == 1
    server.status = 503
    threading.Timer(0.25, lambda: setattr(server, "status", None)).start()
    assert source.open(0).read(0)
    assert len(server.requests) > 4


def test_streams_are_read_by_one_request(val, server):
    (val / "large.bin").write_bytes(content := os.urandom(20 << 20))
    with storage.open_stream(f"{server.url}/large.bin") as stream:
        received = b"".join(iter(lambda: stream.read(8 << 20), b""))
    assert received == content
    assert server.requests == ["/large.bin"]


def test_missing_shard_is_named(val, server):
    source, remote = load(val), load(server.url)
    (val / "shard-00001.tar").unlink()
    for broken in (source, remote):
        with pytest.raises(UserError, match=r"shard-00001\.tar: this shard is in the index but not in the folder"):
            broken.open(1)


@pytest.mark.parametrize("change", [-1000, 10240])
def test_tar_of_another_size_is_named_at_once(val, server, change):
    source, remote = load(val), load(server.url)
    path = val / "shard-00000.tar"
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + bytes(change))
    for broken in (source, remote):
        with pytest.raises(UserError, match=rf"{len(data) + change:,} bytes, the index says {len(data):,}"):
            broken.open(0)
    assert server.requests.count("/shard-00000.tar") == 1, "what the server really has is not worth a second try"


def test_tar_that_was_replaced_by_another_of_the_same_size_is_named(val):
    source = load(val)
    first, second = source.index.shards[:2]
    path = val / first.name
    replacement = (val / second.name).read_bytes()[: first.bytes].ljust(first.bytes, b"\0")
    path.write_bytes(replacement)
    with pytest.raises(UserError, match=r"row 0 should be '.*' at byte 512.*index does not match the tar"):
        source.open(0).read(0)


def test_member_table_that_points_outside_the_tar_is_named(val):
    index = ShardIndex.load(str(val))
    members = index.members(0)
    for change in ({"offsets": members.offsets + 10**9}, {"offsets": members.offsets * 0},
                   {"sizes": members.sizes + 10**8}):
        wrong = dataclasses.replace(members, **change)
        Path(index.members_url(0)).write_bytes(wrong.to_bytes())
        with pytest.raises(UserError, match="index does not match the tar"):
            load(val).open(0).read(1)


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_tars_made_elsewhere(tmp_path, format):
    """Names behind ./, in other alphabets, and too long for a plain header."""
    content_file = tmp_path / "content"
    names = ["./plain.jpg", "köln.jpg", "d" * 90 + "/" + "n" * 60 + ".jpg"]
    with tarfile.open(tmp_path / "a.tar", "w", format=format) as tar:
        for number, name in enumerate(names):
            for suffix, content in ((".jpg", b"image %d" % number), (".cls", b"0")):
                content_file.write_bytes(content)
                tar.add(content_file, name.replace(".jpg", suffix))
    index_tars(str(tmp_path), IndexOptions())
    opened = load(tmp_path).open(0)
    assert [opened.read(row) for row in range(3)] == [b"image 0", b"image 1", b"image 2"]


def test_subset_rows_and_counts(val):
    index = ShardIndex.load(str(val))
    rng = np.random.default_rng(0)
    masks = [rng.random(shard.count) < 0.4 for shard in index.shards]
    masks[1][:] = False
    Subset.from_masks(index, "some", masks, {}).save()
    source, whole = load(val, "some"), load(val)
    assert source.counts.tolist() == [int(mask.sum()) for mask in masks]
    opened = source.open(0)
    assert opened.used.tolist() == np.flatnonzero(masks[0]).tolist()
    dense = np.concatenate([whole.open(s).labels.dense(whole.classes)[mask] for s, mask in enumerate(masks)])
    positives, negatives = source.subset_counts()
    assert positives.tolist() == (dense == 1).sum(0).tolist()
    assert negatives.tolist() == (dense == 0).sum(0).tolist()
    with pytest.raises(UserError, match="no subset named 'none'"):
        load(val, "none")
