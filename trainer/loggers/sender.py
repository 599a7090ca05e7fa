"""One thread that talks to a service, in order: training neither waits for it nor ends with it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger("lacuna")
_LAST_SECONDS = 60.0  # for what is still to be sent when a launch ends


class Sender:
    def __init__(self, service: str):
        self.service, self.failed = service, False
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"lacuna-{service}", daemon=True)
        self._thread.start()

    def put(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self, seconds: float = _LAST_SECONDS) -> None:
        self._jobs.put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning("%s did not answer within %.0f s: it may lack the last lines (metrics.jsonl has all)",
                        self.service, seconds)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if not self.failed:
                    job()
            except Exception as error:  # whatever a service's package throws
                self.failed = True
                log.warning("%s gets no more lines of this launch (metrics.jsonl has all): %s: %s", self.service,
                            type(error).__name__, " ".join(str(error).split())[:300])
