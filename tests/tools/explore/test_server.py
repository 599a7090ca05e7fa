"""Proves that explore answers with what is there, to those who may ask, and hands no entry to two people."""

from __future__ import annotations

import json
import socket

import pytest

from lacuna import state_store
from lacuna.basics.errors import UserError
from lacuna.tools.cli import main
from lacuna.tools.explore import sharing
from lacuna.tools.explore.gate import Gate, check_addresses
from tests.helpers.exploring import serving


def test_answers(served, trained):
    items = served.get("/api/list?view=missing&class=3&count=4")["items"]
    assert [item["place"] for item in items] == [0, 1, 2, 3]
    store = state_store.open(trained.scl + "/state")
    scores = store.reader(store.snapshots()[-1].name).read_shard("score", items[0]["shard"])
    assert items[0]["score"] == pytest.approx(scores[items[0]["row"], 3] / 255)
    place = f"shard={items[0]['shard']}&row={items[0]['row']}"
    sample = served.get(f"/api/sample?{place}")
    assert sample["key"] == served.desk.source.index.members(items[0]["shard"]).keys[items[0]["row"]]
    assert len(sample["positives"]) == 1
    assert sample["maps"] == list(range(10))
    plain, heat = (served.ask(f"/picture?{place}{more}", **served.allowed) for more in ("", "&class=3"))
    assert plain[0] == heat[0] == 200
    assert plain[1][:2] == heat[1][:2] == b"\xff\xd8"
    assert plain[1] != heat[1]
    for path, code in (("/api/list?view=class", 400), ("/api/list?class=99", 400), ("/picture?shard=0&row=9999", 400),
                       ("/api/sample?shard=x&row=0", 400), ("/../etc/passwd", 404), ("/app.py", 404),
                       ("/api/list?view=annotated", 400), ("/api/list?" + "a=1&" * 50, 400)):
        assert served.ask(path, **served.allowed)[0] == code, path


def test_only_with_the_token(served):
    """Nothing is answered without it; the address that is printed puts it into a cookie that scripts cannot read."""
    gate = served.gate
    for path in ("/", "/app.js", "/api/overview", "/api/list", "/picture?shard=0&row=0", "/?token=wrong", "/?token="):
        assert served.ask(path)[0] == 401, path
        assert served.ask(path, Cookie=f"{gate.cookie}=wrong")[0] == 401, path
    assert served.ask("/api/overview?token=" + gate.token)[0] == 401, "only the page itself takes it from the address"
    assert served.ask("/api/decide", {"actions": []}, **{"X-Lacuna": "1"})[0] == 401
    status, _, headers = served.exchange(gate.address.partition(str(gate.port))[2], None, {})
    assert (status, headers["Location"]) == (303, "./")
    assert headers["Set-Cookie"] == f"{gate.cookie}={gate.token}; Path=/; HttpOnly; SameSite=Lax"
    assert served.ask("/", Cookie=headers["Set-Cookie"].partition(";")[0])[0] == 200
    with serving(served.desk) as other:
        assert other.gate.token != gate.token
        assert other.ask("/api/overview", **served.allowed)[0] == 401


def test_other_sites_are_refused(served):
    """Another Host, another Origin, a form without our header: no answer and no change."""
    entry = {"who": "", "actions": [{"shard": 0, "row": 0, "class": 0, "decision": "accept"}]}
    allowed, port = served.allowed, served.gate.port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
        assert served.ask("/api/overview", None, **{**allowed, "Host": host})[0] == 403, host
        assert served.ask(f"/?token={served.gate.token}", None, Host=host)[0] == 403, host
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": f"https://127.0.0.1:{port}"},
                    {"Origin": f"http://127.0.0.1:{port + 1}"}, {"Sec-Fetch-Site": "cross-site"},
                    {"Sec-Fetch-Site": "same-site"}, {"X-Lacuna": "2"}):
        assert served.ask("/api/decide", entry, **{**allowed, **headers})[0] == 403, headers
    assert served.ask("/api/decide", entry, Cookie=allowed["Cookie"])[0] == 403, "a form cannot send our header"
    assert served.desk.decisions.votes == {}
    assert served.ask("/api/decide", entry, **{**allowed, "Origin": f"http://localhost:{port}"})[0] == 200
    assert served.desk.decisions.made == {(0, 0, 0): "accept"}


def test_bad_requests_change_nothing(served):
    good = {"shard": 0, "row": 0, "class": 0, "decision": "accept"}
    for actions in ([{**good, "decision": "maybe"}], [{**good, "row": 10**6}], [good, {**good, "class": "x"}], [7], "x",
                    [{**good, "row": None}], [{"decision": "accept"}]):
        assert served.ask("/api/decide", {"who": "", "actions": actions}, **served.allowed)[0] == 400, actions
    for who in ("x" * 100, "a\x00b"):
        assert served.ask("/api/decide", {"who": who, "actions": [good]}, **served.allowed)[0] == 400
    assert served.ask("/api/decide", {"who": "x" * 300_000, "actions": []}, **served.allowed)[0] == 413
    assert served.ask("/api/export", {"kind": "exe"}, **served.allowed)[0] == 400
    assert served.desk.decisions.votes == {}
    with socket.create_connection(("127.0.0.1", served.gate.port), timeout=60) as raw:
        head = f"POST /api/decide HTTP/1.1\r\nHost: 127.0.0.1:{served.gate.port}\r\nContent-Length: -5\r\n"
        raw.sendall((head + "".join(f"{k}: {v}\r\n" for k, v in served.allowed.items()) + "\r\n").encode())
        assert b" 413 " in raw.recv(1000)


def test_pages_are_closed_to_others(served):
    """Headers that keep other sites from framing, sniffing or reading what is sent."""
    _, _, headers = served.exchange("/", None, served.allowed)
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"


def test_addresses():
    own = Gate("127.0.0.1", 8753)
    assert own.hosts == {"127.0.0.1:8753", "localhost:8753"}
    assert own.encrypted
    network = Gate("192.168.0.7", 8753)
    assert network.hosts == {"192.168.0.7:8753"}
    assert network.origins == {"http://192.168.0.7:8753"}
    assert not network.encrypted
    assert Gate("fe80::7", 8753).hosts == {"[fe80::7]:8753"}
    proxied = Gate("127.0.0.1", 8753, "https://Labels.example.org/team/")
    assert "labels.example.org" in proxied.hosts
    assert "https://labels.example.org" in proxied.origins
    assert "http://labels.example.org" not in proxied.origins
    assert proxied.encrypted
    assert proxied.address == f"https://Labels.example.org/team/?token={proxied.token}"
    assert proxied.set_cookie().endswith("; Secure")
    assert not Gate("127.0.0.1", 8753, "http://labels.example.org").encrypted
    for host, url in (("0.0.0.0", None), ("::", None), ("127.0.0.1", "labels.example.org"), ("127.0.0.1", "ftp://x")):
        with pytest.raises(UserError, match=r"--host|--public-url"):
            check_addresses(host, url)
    check_addresses("0.0.0.0", "https://labels.example.org")


def test_mistakes(trained, served, capsys):
    assert main(["explore", str(trained.data)]) == 2
    assert "not a run folder" in capsys.readouterr().err
    assert main(["explore", trained.scl, "--port", str(served.gate.port)]) == 2
    assert "Choose another" in capsys.readouterr().err
    assert main(["explore", trained.scl, "--host", "192.0.2.1", "--port", "0"]) == 2
    assert "--host 192.0.2.1" in capsys.readouterr().err
    assert main(["explore", trained.scl, "--host", "0.0.0.0"]) == 2
    assert "--public-url" in capsys.readouterr().err


def test_nobody_is_shown_what_another_is_at_work_on(served, monkeypatch):
    """Two people get different entries of one list, in its order; decided ones are second looks; time frees others."""
    whole = [(i["shard"], i["row"]) for i in served.get("/api/list?view=missing&class=2&count=60")["items"]]

    def seen(who: str, start: int = 0, count: int = 10, view: str = "missing") -> list[tuple[int, int]]:
        found = served.get(f"/api/list?view={view}&class=2&start={start}&count={count}&who={who}")
        return [(i["shard"], i["row"]) for i in found["items"]]

    assert seen("ann") == whole[:10]
    assert seen("bob") == whole[10:20]
    assert seen("ann") == whole[:10], "one's own entries stay"
    assert seen("ann", 10) == whole[20:30]
    shard, row = whole[0]
    served.decide("ann", {"shard": shard, "row": row, "class": 2, "decision": "reject", "view": "missing"})
    assert seen("ann", count=1) == whole[:1]
    assert seen("bob", view="second") == whole[:1]
    later = sharing.time.monotonic() + 3600
    monkeypatch.setattr(sharing, "now", lambda: later)
    assert seen("cleo", count=9) == whole[1:10], "what ann decided stays hers"
    served.decide("bob", {"shard": shard, "row": row, "class": 2, "decision": "accept", "view": "second"})
    conflict = served.get("/api/list?view=conflicts&class=all&who=cleo")["items"]
    assert [(i["shard"], i["row"], i["others"]) for i in conflict] == [
        (shard, row, {"ann": "reject", "bob": "accept"})]


def test_undo_leads_back(served):
    """To the view, list and place of the vote that was undone, whatever was looked at since."""
    served.decide("ann", {"shard": 0, "row": 1, "class": 4, "decision": "accept", "view": "missing", "list_class": 4,
                          "place": 17})
    served.decide("bob", {"shard": 0, "row": 1, "class": 4, "decision": "reject", "view": "second"})
    moved = served.decide("ann", {"decision": "undo"})["moved"]
    assert moved == [{"shard": 0, "row": 1, "class": 4, "view": "missing", "list_class": 4, "place": 17,
                      "decision": None}]
    assert served.decide("ann", {"decision": "redo"})["moved"][0]["decision"] == "accept"
    assert served.decide("ann", {"decision": "redo"})["moved"] == []
    assert json.loads(open(served.desk.decisions.path).readline())["place"] == 17  # noqa: SIM115
