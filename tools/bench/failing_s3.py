"""The tiny S3 server with faults: errors, throttling, slow answers, cut bodies, answers lost after the deed.

SIGUSR1 begins an outage (503 to everything), SIGUSR2 ends it.
"""

from __future__ import annotations

import random
import signal
import socket
import threading
import time

from lacuna.tools.bench import s3_stand_in

FAULTS = {"500": 0.01, "503": 0.02, "slow": 0.01, "truncate": 0.02, "lost": 0.01}
_SLOW_SECONDS = 0.3


class _Faulty(s3_stand_in.Handler):
    outage = threading.Event()
    random = random.Random(0)
    lost = cut = False

    def handle_one(self) -> None:
        at, kind = self.random.random(), None
        for name, probability in FAULTS.items():
            if at < probability:
                kind = name
                break
            at -= probability
        if kind == "slow":
            time.sleep(_SLOW_SECONDS)
        self.lost, self.cut = kind == "lost", kind == "truncate" and self.command == "GET"
        if kind in ("500", "503") or self.outage.is_set():
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.lost = False
            super()._answer(int(kind or 503), s3_stand_in.error("SlowDown"))
            return
        super().handle_one()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_one

    def _answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        if self.lost:
            super()._answer(500, s3_stand_in.error("InternalError"))
        elif self.cut and len(data) > 1:
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        else:
            super()._answer(status, data, headers)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: _Faulty.outage.set())
    signal.signal(signal.SIGUSR2, lambda *_: _Faulty.outage.clear())
    s3_stand_in.serve(_Faulty)
