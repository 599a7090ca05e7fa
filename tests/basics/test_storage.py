"""Proves that writes appear whole, creation is exclusive, and only transient remote errors are retried."""

from __future__ import annotations

import functools
import logging
import os
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from lacuna.basics import retries, storage


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    return str(tmp_path / "x") if request.param == "local" else f"memory://test-storage-{os.urandom(4).hex()}"


def test_write_read_list_remove(root):
    url = storage.join(root, "deep", "a.bin")
    assert not storage.exists(url)
    assert storage.list_names(storage.join(root, "deep")) == []
    storage.write_atomic(url, b"one")
    storage.write_atomic(url, memoryview(b"three"))
    assert storage.read_bytes(url) == b"three"
    assert storage.size(url) == 5
    assert storage.list_names(storage.join(root, "deep")) == ["a.bin"]
    with storage.open_stream(url) as stream:
        assert stream.read() == b"three"
    storage.remove([url, url])
    assert not storage.exists(url)
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(url)


def test_exclusive_creation_has_one_winner(tmp_path):
    url = str(tmp_path / "lock")
    wins = []
    threads = [threading.Thread(target=lambda i=i: wins.append(i) if storage.create_exclusive(url, b"%d" % i) else None)
               for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wins) == 1
    assert storage.read_bytes(url) == b"%d" % wins[0]
    assert os.listdir(tmp_path) == ["lock"]


def test_failed_write_keeps_the_old_bytes(tmp_path):
    url = str(tmp_path / "a")
    storage.write_atomic(url, b"old")
    with pytest.raises(TypeError):
        storage.write_atomic(url, "text, not bytes")  # type: ignore[arg-type]
    assert storage.read_bytes(url) == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_retries_transient_errors_only(caplog, monkeypatch):
    monkeypatch.setattr(retries, "_last_said", [-retries._QUIET_SECONDS])
    calls = []

    def flaky():
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionResetError("gone")
        return "ok"

    for url in ("s3://bucket/one", "s3://bucket/two"):
        calls.clear()
        assert retries.retrying(flaky, url) == "ok"
    assert [record.getMessage() for record in caplog.records] == [
        "s3://bucket/one: ConnectionResetError gone; trying again"], "an outage is told once, not for every file"
    calls.clear()

    def absent():
        calls.append(1)
        raise FileNotFoundError("x")

    with pytest.raises(FileNotFoundError):
        retries.retrying(absent, "x")
    assert len(calls) == 1


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *ignored):
        pass


def test_plain_http(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"x" * 100_000)
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        assert storage.read_bytes(f"{url}/a.bin") == b"x" * 100_000
        assert storage.size(f"{url}/a.bin") == 100_000
        assert (storage.exists(f"{url}/a.bin"), storage.exists(f"{url}/b.bin")) == (True, False)
        with storage.open_stream(f"{url}/a.bin") as stream:
            assert len(stream.read()) == 100_000
        with pytest.raises(FileNotFoundError):
            storage.read_bytes(f"{url}/b.bin")
    finally:
        server.shutdown()
        server.server_close()


def test_a_call_that_waits_is_told_while_it_waits(monkeypatch):
    """A frozen server answers nothing, and a client tries again by itself: both are seen from outside the call."""
    monkeypatch.setattr(retries, "_last_said", [-retries._QUIET_SECONDS])
    said, words = threading.Event(), list[str]()
    monkeypatch.setattr(retries.log, "warning", lambda form, text: (words.append(form % text), said.set()))
    assert retries.retrying(lambda: said.wait(60), "s3://bucket/x", patience=0.1), "nothing was said while it waited"
    assert "s3://bucket/x: not done after" in words[-1]
    assert "the storage is slow or does not answer; still waiting" in words[-1]


def test_an_object_replaced_between_two_questions_is_no_fault(monkeypatch):
    """Its size was asked after its bytes: they are read again, without a word and without waiting."""
    class Replaced:
        answers: ClassVar = [(b"long before", 5), (b"after", 5)]

        def cat_file(self, path):
            return self.answers[0][0]

        def size(self, path):
            return self.answers.pop(0)[1]

    monkeypatch.setattr(storage, "_file_system", lambda url: (Replaced(), "x"))
    monkeypatch.setattr(retries, "_say", lambda *_: pytest.fail("a fault was reported"))
    assert storage.read_bytes("s3://bucket/x") == b"after"


def test_futures_that_the_client_gave_up_are_not_reported(caplog):
    logging.getLogger("asyncio").error("Task exception was never retrieved\nfuture: <Task finished>")
    logging.getLogger("asyncio").error("another word")
    assert [record.getMessage() for record in caplog.records] == ["another word"]
