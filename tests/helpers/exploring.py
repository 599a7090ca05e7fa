"""A running `lacuna explore` over a run, in this process, and a client that is no browser."""

from __future__ import annotations

import argparse
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lacuna.tools.explore import open_desk
from lacuna.tools.explore.desk import Desk
from lacuna.tools.explore.gate import HEADER, Gate
from lacuna.tools.explore.server import make_server


def desk_of(run: str, labels: str | None = None, scores: str | None = None) -> Desk:
    return open_desk(run, labels, argparse.Namespace(workers=1, address=None, parts=None, scores=scores))


@dataclass(frozen=True)
class Served:
    desk: Desk
    gate: Gate

    @property
    def allowed(self) -> dict[str, str]:
        return {"Cookie": f"{self.gate.cookie}={self.gate.token}", HEADER: "1"}

    def ask(self, path: str, body: dict | None = None, **headers: str) -> tuple[int, bytes]:
        """(status, answer) of a request with exactly these headers; a body makes it a POST."""
        status, answer, _ = self.exchange(path, body, headers)
        return status, answer

    def exchange(self, path: str, body: dict | None, headers: dict[str, str]) -> tuple[int, bytes, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.gate.port, timeout=60)
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        found = answer.status, answer.read(), dict(answer.getheaders())
        connection.close()
        return found

    def get(self, path: str) -> dict:
        code, answer = self.ask(path, **self.allowed)
        assert code == 200, answer
        return json.loads(answer)

    def decide(self, who: str, *actions: dict) -> dict:
        code, answer = self.ask("/api/decide", {"who": who, "actions": list(actions)}, **self.allowed)
        assert code == 200, answer
        return json.loads(answer)


@contextmanager
def serving(desk: Desk, **options: str | None) -> Iterator[Served]:
    with make_server(desk, 0, **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield Served(desk, server.gate)
        finally:
            server.shutdown()
            thread.join()
