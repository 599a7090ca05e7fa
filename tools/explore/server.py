"""The web server: standard library only, one page and a few JSON answers, for those whom the gate lets in."""

from __future__ import annotations

import json
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lacuna.basics.errors import UserError
from lacuna.basics.json_text import parse_json
from lacuna.tools.explore.decisions import Action, Entry
from lacuna.tools.explore.desk import Desk
from lacuna.tools.explore.gate import HEADER, LOOPBACK, Gate

_LONGEST_BODY = 200_000
_FILES = {"/": ("app.html", "text/html"), "/app.css": ("app.css", "text/css"),
          **{f"/{name}.js": (f"{name}.js", "text/javascript") for name in ("app", "talk", "place", "sheet", "single")}}
_HEADERS = {"Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; "
                                       "base-uri 'none'; form-action 'none'",
            "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin"}
_WITHOUT_TOKEN = "Open the address that `lacuna explore` printed: it holds the token that lets you in."


class Server(ThreadingHTTPServer):
    daemon_threads = True
    gate: Gate

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that was closed resets its connections: nothing to tell the terminal about."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


def make_server(desk: Desk, port: int, host: str = LOOPBACK, public_url: str | None = None) -> Server:
    """Not yet serving; port 0 takes a free one."""
    handler: type[_Handler] = type("Handler", (_Handler,), {"desk": desk})
    kind = type("Server6", (Server,), {"address_family": socket.AF_INET6}) if ":" in host else Server
    try:
        server = kind((host, port), handler)
    except (OSError, OverflowError) as error:
        raise UserError(f"--host {host} --port {port}: {(getattr(error, 'strerror', None) or str(error)).lower()}. "
                        "Choose another port, or 0 for a free one, and an address of this machine.") from None
    server.gate = handler.gate = Gate(host, server.server_port, public_url)
    return server


class _Handler(BaseHTTPRequestHandler):
    desk: Desk
    gate: Gate
    protocol_version = "HTTP/1.1"  # a sheet is dozens of pictures: one connection for all
    timeout = 60  # of a connection on which nothing comes

    def do_GET(self) -> None:
        if self.headers.get("Transfer-Encoding") or (self.headers.get("Content-Length") or "0") != "0":
            # Nobody reads it, so a proxy that hands on several people's requests could take it for the next one.
            self._refuse(400, "a question has no body")
        else:
            self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet: a line per picture would flood the terminal."""

    def _answer(self, work) -> None:
        try:
            url = urlsplit(self.path)
            self.query = {name: values[-1] for name, values in parse_qs(url.query, max_num_fields=30).items()}
            if not self.gate.knows_host(self.headers):
                self._refuse(403, "this server answers to its own address only")
            elif url.path == "/" and self.gate.is_token(self.query.get("token", "")):
                self._welcome()
            elif not self.gate.has_token(self.headers):
                self._refuse(401, _WITHOUT_TOKEN)
            else:
                work(url.path)
        except UserError as error:
            self._refuse(400, str(error))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            self._refuse(400, f"bad request: {type(error).__name__}: {error}")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the page moved on

    def _welcome(self) -> None:
        """The token goes into a cookie and out of the address line; a place behind # stays where it is."""
        self._bytes(303, "text/plain", b"", {"Location": "./", "Set-Cookie": self.gate.set_cookie()})

    def _get(self, path: str) -> None:
        query, who = self.query, self.query.get("who", "")
        if path in _FILES:
            name, kind = _FILES[path]
            self._bytes(200, kind + "; charset=utf-8", (resources.files("lacuna.tools.explore") / name).read_bytes())
        elif path == "/api/overview":
            self._send(200, self.desk.overview(who))
        elif path == "/api/list":
            cls = None if query.get("class", "all") == "all" else int(query["class"])
            self._send(200, self.desk.page(query.get("view", "missing"), cls, int(query.get("start", 0)),
                                           int(query.get("count", 50)), who))
        elif path == "/api/sample":
            self._send(200, self.desk.sample(int(query["shard"]), int(query["row"])))
        elif path == "/picture":
            heat = int(query["class"]) if "class" in query else None
            data = self.desk.picture(int(query["shard"]), int(query["row"]), int(query.get("side", 640)), heat)
            self._bytes(200, "image/jpeg", data, {"Cache-Control": "private, max-age=600"})
        else:
            self._send(404, {"error": f"nothing at {path}"})

    def _post(self, path: str) -> None:
        if not self.gate.may_change(self.headers):
            self._refuse(403, f"changes come from this server's own pages, with the header {HEADER}: 1")
            return
        length = int(self.headers.get("Content-Length") or 0)
        if self.headers.get("Transfer-Encoding"):
            self._refuse(411, "say how long it is: Content-Length")
            return
        if not 0 <= length <= _LONGEST_BODY:
            self._refuse(413, "too long")
            return
        body = parse_json(self.rfile.read(length))
        if path == "/api/decide":
            who = str(body.get("who", ""))
            self._send(200, self.desk.decide(who, [_action(one, who) for one in body["actions"]]))
        elif path == "/api/export":
            self._send(200, self.desk.export(str(body["kind"]), str(body.get("name", ""))))
        else:
            self._send(404, {"error": f"nothing at {path}"})

    def _refuse(self, code: int, why: str) -> None:
        self.close_connection = True  # what was sent along was not read
        self._send(code, {"error": why})

    def _send(self, code: int, body: dict) -> None:
        self._bytes(code, "application/json", json.dumps(body, ensure_ascii=False).encode())

    def _bytes(self, code: int, kind: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        own = {"Content-Type": kind, "Content-Length": str(len(data)), "Cache-Control": "no-store",
               **({"Connection": "close"} if self.close_connection else {})}
        for name, value in {**own, **_HEADERS, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def _action(body: dict, who: str) -> Action:
    entry: Entry | None = None
    if "shard" in body:
        entry = (int(body["shard"]), int(body["row"]), int(body["class"]))
    listed = body.get("list_class")
    return Action(str(body["decision"]), entry, who, str(body.get("view", ""))[:20],
                  None if listed in (None, "all") else int(listed), int(body.get("place", 0)),
                  body.get("settles") is True, str(body.get("id", "")))
