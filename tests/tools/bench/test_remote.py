"""The benchmark's S3 server answers as S3 does to all that storage asks; both sides of the benchmark read the same."""

from __future__ import annotations

import argparse

import pytest

from lacuna.basics import storage
from lacuna.tools.bench import remote
from lacuna.tools.bench.s3_stand_in import serving


def test_the_stand_in_speaks_enough_s3(tmp_path):
    with serving(0.0) as variables, remote.environment(variables):
        url = "s3://bench/a/one"
        storage.write_atomic(url, b"x" * 100_000)
        assert storage.read_bytes(url) == b"x" * 100_000
        assert storage.size(url) == 100_000
        with storage.open_stream(url) as stream:
            assert len(stream.read()) == 100_000
        assert not storage.create_exclusive(url, b"y")
        assert storage.create_exclusive("s3://bench/a/two & more", b"y")
        assert storage.list_names("s3://bench/a") == ["one", "two & more"]
        assert storage.list_names("s3://bench/") == ["a"]
        assert (storage.exists(url), storage.exists("s3://bench/none")) == (True, False)
        with pytest.raises(FileNotFoundError):
            storage.read_bytes("s3://bench/none")
        (tmp_path / "file").write_bytes(b"z" * 10)
        storage.upload(str(tmp_path / "file"), "s3://bench/b/file")
        storage.download("s3://bench/b/file", str(tmp_path / "deep" / "copy"))
        assert (tmp_path / "deep" / "copy").read_bytes() == b"z" * 10
        storage.remove([url, "s3://bench/a/never"])
        storage.remove_tree("s3://bench/b")
        assert storage.list_names("s3://bench/") == ["a"]


def test_both_sides_read_the_same_and_the_ratio_is_that_of_the_rates():
    report = remote.run(True, argparse.Namespace(steps=6, latency_ms=5.0, step_ms=10.0))
    local, far = report["local"], report["remote"]
    assert local["checksum"] == far["checksum"] != 0
    assert far["samples_per_second"] <= 32 / 0.010  # no faster than the steps that it computes
    quotient = far["samples_per_second"] / local["samples_per_second"]
    assert report["ratios"] == {"vs_local": pytest.approx(quotient, rel=0.01, abs=0.001)}
    assert (report["latency_ms"], report["step_ms"]) == (5.0, 10.0)
