"""Shared fixtures: small sets of digit scenes, packed once per test session, and an S3 server with faults."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from lacuna.data_pipelines.annotation.annotate import SCHEMES, annotate
from lacuna.data_pipelines.annotation.labelled_rows import LabelledRows
from lacuna.data_pipelines.index import ShardIndex, Sidecar
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import digits
from tests.helpers import s3_server
from tests.helpers.small_disk import mounted

# By default an example has 200 ms, which a busy machine exceeds: no test asserts how long something takes.
settings.register_profile("lacuna", deadline=None)
settings.load_profile("lacuna")
# Under nohup or as a background job Ctrl-C is ignored, here and in every process that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def digit_shards(tmp_path_factory) -> Path:
    """train (410 scenes in 13 uneven shards), val and test (60 each) with full labels, in the sidecar `labels`."""
    folder = tmp_path_factory.mktemp("digits")
    for split, count, rows in (("train", 410, 32), ("val", 60, 16), ("test", 60, 16)):
        pack(digits.read(count, split), str(folder / split), Layout(streams=1, rows_per_shard=rows), workers=1)
    return folder


@pytest.fixture(scope="session")
def single_shards(digit_shards, tmp_path_factory) -> Path:
    """A copy of them, with one positive per scene in train's sidecar `single`."""
    folder = tmp_path_factory.mktemp("single") / "digits"
    shutil.copytree(digit_shards, folder)
    index = ShardIndex.load(str(folder / "train"))
    annotate(LabelledRows(index, Sidecar.load(index, "labels")), "single", "single_positive",
             SCHEMES["single_positive"]())
    return folder


@pytest.fixture(scope="session")
def s3_process():
    reason = s3_server.install()
    if reason:
        pytest.skip(f"no moto server: {reason}")
    server = s3_server.Server()
    yield server
    server.stop()


@pytest.fixture
def s3(s3_process, monkeypatch):
    """The fault proxy; `s3://bucket/…` URLs of this process and its children go through it."""
    from fsspec.config import conf
    from s3fs import S3FileSystem

    proxy = s3_server.Proxy(s3_process.port)
    for name, value in {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "AWS_ACCESS_KEY_ID": s3_process.key,
                        "AWS_SECRET_ACCESS_KEY": s3_process.secret, "AWS_DEFAULT_REGION": "us-east-1",
                        "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(conf, "s3", {})
    S3FileSystem.clear_instance_cache()
    yield proxy
    S3FileSystem.clear_instance_cache()
    proxy.stop()


@pytest.fixture
def small_disk(tmp_path):
    """Eight megabytes that can be filled; skipped where none can be mounted."""
    with mounted(tmp_path / "disk") as place:
        yield place
