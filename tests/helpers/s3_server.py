"""An S3 server on loopback for tests: moto in a venv of its own, with authentication, behind a proxy with faults.

moto's botocore conflicts with aiobotocore's, so it cannot live in the project's venv; a test that finds no `.venv-moto`
makes it.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv-moto"
_MOTO = "moto[server]==5.2.5"  # the version that the suite has passed with
_HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "content-length"}


def install() -> str | None:
    """Make the venv if it is not there; returns why that is impossible, or None."""
    python = VENV / "bin" / "python"
    with open(ROOT / ".venv-moto.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may want it at once
        if (VENV / "bin" / "moto_server").exists():
            return None
        for command in ([sys.executable, "-m", "venv", str(VENV)],
                        [str(python), "-m", "pip", "install", "--quiet", _MOTO]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                return f"{' '.join(command[1:])}: {done.stderr.strip().splitlines()[-1:]}"
    return None


class Server:
    """moto_server with IAM checks: after the user is made, requests without its key are refused."""

    def __init__(self) -> None:
        self.port = _free_port()
        environment = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "3"}
        self.process = subprocess.Popen([str(VENV / "bin" / "moto_server"), "-H", "127.0.0.1", "-p", str(self.port)],
                                        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _wait_for(self.port, self.process)
        self.key, self.secret = self._make_user()

    def _make_user(self) -> tuple[str, str]:
        import botocore.session

        policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
        session = botocore.session.Session()
        iam = session.create_client("iam", "us-east-1", endpoint_url=f"http://127.0.0.1:{self.port}",
                                    aws_access_key_id="setup", aws_secret_access_key="setup")
        iam.create_user(UserName="lacuna")
        iam.put_user_policy(UserName="lacuna", PolicyName="all", PolicyDocument=json.dumps(policy))
        made = iam.create_access_key(UserName="lacuna")["AccessKey"]
        s3 = session.create_client("s3", "us-east-1", endpoint_url=f"http://127.0.0.1:{self.port}",
                                   aws_access_key_id=made["AccessKeyId"], aws_secret_access_key=made["SecretAccessKey"])
        s3.create_bucket(Bucket="bucket")
        return made["AccessKeyId"], made["SecretAccessKey"]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(120)


class Proxy:
    """Forwards to the server; `faults` maps a kind (500, 503, slow, truncate, lost) to its probability.

    `lost` answers a request that was carried out with 500: the client cannot know, and must not be confused.
    """

    def __init__(self, target: int):
        self.faults: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.requests = 0
        self.random = random.Random(0)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, target))
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def draw(self) -> str | None:
        self.requests += 1
        at = self.random.random()
        for kind, probability in self.faults.items():
            if at < probability:
                self.counts[kind] = self.counts.get(kind, 0) + 1
                return kind
            at -= probability
        return None

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def _handler(proxy: Proxy, target: int) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Silence: a request a line would drown the test's output."""

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            kind = proxy.draw()
            if kind == "slow":
                time.sleep(0.3)
            if kind in ("500", "503"):
                self.answer(int(kind), {}, b"<Error><Code>SlowDown</Code><Message>injected</Message></Error>")
                return
            upstream = http.client.HTTPConnection("127.0.0.1", target, timeout=120)
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                upstream.putheader(name, value)
            upstream.endheaders(body)
            reply = upstream.getresponse()
            data = reply.read()
            if kind == "lost":
                self.answer(500, {}, b"<Error><Code>InternalError</Code><Message>injected</Message></Error>")
                return
            self.answer(reply.status, dict(reply.getheaders()), data, kind == "truncate" and self.command == "GET")

        def answer(self, status: int, headers: dict[str, str], data: bytes, cut: bool = False) -> None:
            self.send_response(status)
            length = headers.get("Content-Length", str(len(data))) if self.command == "HEAD" else str(len(data))
            for name, value in headers.items():
                if name.lower() not in _HOP_HEADERS:
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command == "HEAD":
                return
            self.wfile.write(data[: len(data) // 2] if cut else data)
            if cut:
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward

    return Handler


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _wait_for(port: int, process: subprocess.Popen) -> None:
    for _ in range(1200):
        if process.poll() is not None:
            raise RuntimeError(f"moto_server ended with {process.returncode}")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("moto_server did not start in 120 s")
