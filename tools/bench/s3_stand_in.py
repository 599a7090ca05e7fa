"""A tiny S3 server in memory that answers every request after a fixed delay; runs as a process of its own.

It knows what training needs: whole and ranged GET, HEAD, PUT (also only-if-absent), listing and deletion. Signatures
are not checked: it measures latency, and is reached on loopback only.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import threading
import time
import xml.sax.saxutils
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

_TIME = "Thu, 01 Jan 2026 00:00:00 GMT"
_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


@contextmanager
def serving(latency: float) -> Iterator[dict[str, str]]:
    """A server for the length of the block; the environment variables that lead to it."""
    process, port = start("lacuna.tools.bench.s3_stand_in", str(latency))
    try:
        yield variables(port)
    finally:
        process.terminate()
        process.wait(10)


def start(module: str, *arguments: str) -> tuple[subprocess.Popen, int]:
    """A server of this kind as a process of its own, and its port."""
    process = subprocess.Popen([sys.executable, "-m", module, *arguments], text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def variables(port: int) -> dict[str, str]:
    return {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench", "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body leave together: Nagle's wait would be measured otherwise
    latency = 0.0
    objects: ClassVar[dict[str, bytes]] = {}
    lock = threading.Lock()

    def log_message(self, *_: object) -> None:
        """Silence: a line a request would be the slowest part."""

    def handle_expect_100(self) -> bool:
        done = super().handle_expect_100()
        self.wfile.flush()  # the client waits for it
        return done

    def handle_one(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        time.sleep(self.latency)
        url = urlsplit(self.path)
        key, query = unquote(url.path).lstrip("/"), parse_qs(url.query, keep_blank_values=True)
        if self.command == "PUT":
            self._put(key, body)
        elif self.command == "POST" and "delete" in query:
            for name in re.findall(r"<Key>(.*?)</Key>", body.decode()):
                self.objects.pop(f"{key.rstrip('/')}/{xml.sax.saxutils.unescape(name)}", None)
            self._answer(200, f"<DeleteResult {_NAMESPACE}/>".encode())
        elif self.command == "DELETE":
            self.objects.pop(key, None)
            self._answer(204)
        elif "list-type" in query:
            self._list(key.rstrip("/"), query)
        else:
            self._get(key)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_one

    def _put(self, key: str, body: bytes) -> None:
        with self.lock:
            taken = self.headers.get("If-None-Match") == "*" and key in self.objects
            if not taken:
                self.objects[key] = body
        self._answer(412 if taken else 200, error("PreconditionFailed") if taken else b"", _facts(body))

    def _get(self, key: str) -> None:
        data = self.objects.get(key)
        if data is None:
            self._answer(404, error("NoSuchKey"))
            return
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if span is None:
            self._answer(200, data, _facts(data))
            return
        start, stop = int(span[1]), min(len(data), int(span[2] or len(data)) + 1)
        self._answer(206, data[start:stop], {**_facts(data), "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        prefix, delimiter = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        names = sorted(key.removeprefix(bucket + "/") for key in list(self.objects) if key.startswith(bucket + "/"))
        found, folders = [], []
        for name in names:
            if not name.startswith(prefix):
                continue
            rest = name[len(prefix):]
            if delimiter and delimiter in rest:
                folders.append(prefix + rest[: rest.index(delimiter) + 1])
            else:
                size = len(self.objects.get(f"{bucket}/{name}", b""))
                found.append(f"<Contents><Key>{xml.sax.saxutils.escape(name)}</Key><Size>{size}</Size>"
                             "<LastModified>2026-01-01T00:00:00Z</LastModified><ETag>x</ETag></Contents>")
        shared = "".join(f"<CommonPrefixes><Prefix>{xml.sax.saxutils.escape(name)}</Prefix></CommonPrefixes>"
                         for name in dict.fromkeys(folders))
        self._answer(200, f"<ListBucketResult {_NAMESPACE}><IsTruncated>false</IsTruncated>{''.join(found)}{shared}"
                          "</ListBucketResult>".encode())

    def _answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        self.wfile.flush()


def _facts(data: bytes) -> dict[str, str]:
    return {"ETag": f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"', "Last-Modified": _TIME}


def error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Silence: a client that was killed is no fault of the server."""


def serve(handler: type[Handler]) -> None:
    """Until the process is ended; the port is the first line that it prints."""
    server = _Server(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    Handler.latency = float(sys.argv[1])
    serve(Handler)
