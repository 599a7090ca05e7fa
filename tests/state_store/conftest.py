"""The S3 server of the state tests: started once, reached through a proxy that can inject faults."""

from __future__ import annotations

import pytest
import s3_server


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
