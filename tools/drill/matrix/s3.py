"""A failing S3 server for the drill, as a process that can be told to fail for a while."""

from __future__ import annotations

import signal
import subprocess
import time

from lacuna.tools.bench import s3_stand_in


class Server:
    """The process; `variables` lead to it."""

    def __init__(self) -> None:
        self.process, port = s3_stand_in.start("lacuna.tools.bench.failing_s3")
        self.variables = s3_stand_in.variables(port)

    def outage(self, seconds: float) -> None:
        """It answers, but only that it cannot."""
        self.process.send_signal(signal.SIGUSR1)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGUSR2)

    def freeze(self, seconds: float) -> None:
        """It does not answer at all."""
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
