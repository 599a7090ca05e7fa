"""The web server: standard library only, bound to this machine, one page and a few JSON answers.

Requests whose Host is another name are refused (a web site could otherwise point its own name at this address), and so
are changes without our header, which other sites' pages cannot send.
"""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lacuna.basics.errors import UserError
from lacuna.tools.explore.desk import Desk

HOST = "127.0.0.1"
HEADER = "X-Lacuna"
_LONGEST_BODY = 10_000
_FILES = {"/": ("app.html", "text/html"), "/app.css": ("app.css", "text/css"), "/app.js": ("app.js", "text/javascript")}
_POLICY = "default-src 'self'; img-src 'self' data:"


def make_server(desk: Desk, port: int) -> ThreadingHTTPServer:
    """Not yet serving; port 0 takes a free one."""
    handler: type[_Handler] = type("Handler", (_Handler,), {"desk": desk})
    try:
        server = ThreadingHTTPServer((HOST, port), handler)
    except OSError as error:
        raise UserError(f"--port {port}: {(error.strerror or str(error)).lower()}. Choose another, or 0 for a free "
                        "one.") from None
    handler.port = server.server_port
    server.daemon_threads = True
    return server


class _Handler(BaseHTTPRequestHandler):
    desk: Desk
    port: int

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: a line a picture would flood the terminal."""

    def _answer(self, work) -> None:
        if self.headers.get("Host") not in (f"{HOST}:{self.port}", f"localhost:{self.port}"):
            self._send(403, {"error": "this server answers to its own address only"})
            return
        try:
            work()
        except UserError as error:
            self._send(400, {"error": str(error)})
        except (ValueError, KeyError, TypeError) as error:
            self._send(400, {"error": f"bad request: {type(error).__name__}: {error}"})
        except (BrokenPipeError, ConnectionResetError):
            pass  # the page moved on

    def _get(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        if url.path in _FILES:
            name, kind = _FILES[url.path]
            self._bytes(200, kind + "; charset=utf-8", (resources.files("lacuna.tools.explore") / name).read_bytes())
        elif url.path == "/api/overview":
            self._send(200, self.desk.overview())
        elif url.path == "/api/list":
            cls = None if query.get("class", "all") == "all" else int(query["class"])
            self._send(200, self.desk.page(query.get("view", "missing"), cls, int(query.get("start", 0)),
                                           int(query.get("count", 50))))
        elif url.path == "/api/sample":
            self._send(200, self.desk.sample(int(query["shard"]), int(query["row"])))
        elif url.path == "/picture":
            cls = int(query["class"]) if "class" in query else None
            data = self.desk.picture(int(query["shard"]), int(query["row"]), int(query.get("side", 640)), cls)
            self._bytes(200, "image/jpeg", data)
        else:
            self._send(404, {"error": f"nothing at {url.path}"})

    def _post(self) -> None:
        if self.headers.get(HEADER) != "1":
            self._send(403, {"error": f"changes need the header {HEADER}: 1"})
            return
        length = int(self.headers.get("Content-Length") or 0)
        if length > _LONGEST_BODY:
            self._send(413, {"error": "too long"})
            return
        body = json.loads(self.rfile.read(length))
        if self.path == "/api/decide":
            self.desk.decisions.decide((int(body["shard"]), int(body["row"]), int(body["class"])), body["decision"])
            self._send(200, {"counts": self.desk.decisions.counts()})
        elif self.path == "/api/export":
            self._send(200, self.desk.export(body["kind"], body.get("name", "")))
        else:
            self._send(404, {"error": f"nothing at {self.path}"})

    def _send(self, code: int, body: dict) -> None:
        self._bytes(code, "application/json", json.dumps(body, ensure_ascii=False).encode())

    def _bytes(self, code: int, kind: str, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Security-Policy", _POLICY)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(data)
