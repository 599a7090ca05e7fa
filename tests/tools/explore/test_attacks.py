"""Attacks on explore: requests that hide others, bodies that exhaust the stack, names and files that lead elsewhere."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from lacuna.basics.errors import UserError
from lacuna.tools.explore.decisions import Decisions

ACTION = {"shard": 0, "row": 0, "class": 0, "decision": "accept"}


def raw(served, request: str, body: str, **headers: str) -> bytes:
    """Everything that one connection answers; it is closed at the end, by the server or after a while."""
    words = {"Host": f"127.0.0.1:{served.gate.port}", **served.allowed, **headers}
    with socket.create_connection(("127.0.0.1", served.gate.port), timeout=60) as connection:
        head = f"{request} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in words.items())
        connection.sendall((head + "\r\n" + body).encode())
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while part := connection.recv(65536):
            answer += part
    return answer


def test_a_request_cannot_hide_another(served):
    """A body that is not read would be taken for the next request, which a proxy may count as somebody else's."""
    inner = json.dumps({"who": "", "actions": [ACTION]})
    hidden = (f"POST /api/decide HTTP/1.1\r\nHost: 127.0.0.1:{served.gate.port}\r\nContent-Length: {len(inner)}\r\n"
              + "".join(f"{name}: {value}\r\n" for name, value in served.allowed.items()) + f"\r\n{inner}")
    for request, headers in (("GET /api/overview", {"Content-Length": str(len(hidden))}),
                             ("GET /api/overview", {"Transfer-Encoding": "chunked"}),
                             ("GET /nothing", {"Content-Length": "1"}),
                             ("POST /api/decide", {"Transfer-Encoding": "chunked", "Content-Length": "0"}),
                             ("POST /nothing", {"Transfer-Encoding": "chunked"})):
        answer = raw(served, request, hidden, **headers)
        assert answer.count(b"HTTP/1.1 ") == 1, answer
        assert answer.split()[1] in (b"400", b"411")
        assert b"Connection: close" in answer
    assert served.desk.decisions.votes == {}
    assert served.ask("/api/overview", **served.allowed)[0] == 200


def test_deep_bodies_are_bad_requests(served):
    deep = "[" * 100_000
    answer = raw(served, "POST /api/decide", deep, **{"Content-Length": str(len(deep))})
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"nested too deeply" in answer


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/b", "", ".", "..", "x\0y", "a\nb"])
def test_sidecars_are_not_written_elsewhere(served, name):
    assert served.ask("/api/decide", {"who": "", "actions": [ACTION]}, **served.allowed)[0] == 200
    before = sorted(Path(served.desk.source.index.url).rglob("*"))
    assert served.ask("/api/export", {"kind": "sidecar", "name": name}, **served.allowed)[0] == 400
    assert sorted(Path(served.desk.source.index.url).rglob("*")) == before


@pytest.mark.parametrize("change", [{"entry": [10**9, 0, 0]}, {"entry": [0, -1, 0]}, {"decision": "rm"}, {"who": "\0"},
                                    {"entry": "x"}, {"entry": {}}, {"more": 1}, {"entry": [1e400, 0, 0]}])
def test_a_strangers_decisions_are_checked(served, tmp_path, change):
    good = {"decision": "accept", "entry": [0, 0, 0], "who": "", "view": "", "list_class": None, "place": 0,
            "settles": False, "id": "", "time": 1.0}
    path = tmp_path / "decisions.jsonl"
    path.write_text(json.dumps(good) + "\n")
    assert Decisions(str(path), served.desk.source.sidecar).made == {(0, 0, 0): "accept"}
    path.write_text(json.dumps({**good, **change}) + "\n")
    with pytest.raises(UserError):
        Decisions(str(path), served.desk.source.sidecar)
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(UserError, match="nested too deeply"):
        Decisions(str(path), served.desk.source.sidecar)
