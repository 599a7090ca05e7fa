"""One round: a run that is struck several times, then trained to its end and compared with one left in peace.

A round is a pure function of the drill's seed and its number. Numbers of ranks may change between launches; the run in
peace then changes them after the same steps, asked politely.
"""

from __future__ import annotations

import glob
import os
import random
import resource
import shutil
import signal
import time
from dataclasses import asdict, dataclass, field

from lacuna.tools.drill.matrix.cells import RANKS, Cell
from lacuna.tools.drill.matrix.damage import HARMS, harm_something
from lacuna.tools.drill.matrix.ranks import ChildFailed, Ranks, in_child
from lacuna.tools.drill.matrix.references import References
from lacuna.tools.drill.matrix.s3 import Server

BLOWS = 6  # at most, in a round: a run may be over before
_DISTURBANCES = {"local": ("pause", "term", "full_disk"), "s3": ("pause", "term", "outage", "freeze")}
_REACH = 0.45  # of a launch's events or seconds, so that a run does not end before its last blow
_TRIES = 3  # launches after damage: one may be needed to find a damaged chunk
_FILE_LIMIT = 8 << 10


@dataclass(frozen=True)
class Blow:
    """What one launch meets; fractions are of what an undisturbed launch of this cell does."""

    ranks: int
    kill: str  # at a storage "event" of one rank, or at a "moment"
    at: float
    victim: int
    everybody: bool  # as a power cut does; otherwise the other ranks have to end by themselves
    disturbance: str = ""  # before the kill
    harm: str = ""  # to a file, after it


def draw(seed: int, number: int, cells: list[Cell]) -> tuple[Cell, list[Blow]]:
    rng = random.Random(f"{seed}/{number}")
    # A round on S3 takes five times as long: every rank makes a client of its own.
    cell, ranks = rng.choices(cells, [1 if cell.storage == "s3" else 5 for cell in cells])[0], rng.choice(RANKS)
    # Another number of ranks under ZeRO 1 and 2 is a conversion in a process of its own, which takes ten seconds.
    changing = rng.random() < (0.5 if cell.stage == "zero0" else 0.15)
    harmed = rng.randrange(BLOWS) if cell.storage == "local" and rng.random() < 0.6 else -1
    blows = []
    for n in range(BLOWS):
        if changing:
            ranks = rng.choice(RANKS)
        kill, at, everybody = rng.choice(("event", "event", "moment")), rng.random(), rng.random() < 0.6
        disturbance = rng.choice(_DISTURBANCES[cell.storage]) if rng.random() < 0.35 else ""
        blows.append(Blow(ranks, kill, at, rng.randrange(ranks), everybody, disturbance,
                          rng.choice(list(HARMS)) if n == harmed else ""))
    return cell, blows


@dataclass
class Result:
    """Of a round; a line of rounds.jsonl."""

    cell: str
    kills: int = 0  # launches ended by SIGKILL after something had been committed
    early: int = 0  # and before
    faults: int = 0  # other ones that met a running launch, or a file of the run
    launches: int = 0
    differences: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)  # at which ranks died
    met: list[str] = field(default_factory=list)  # the other faults
    survived: list[float] = field(default_factory=list)  # seconds that other ranks outlived one that was killed
    seconds: float = 0.0

    def line(self) -> dict:
        return asdict(self)


class Play:
    """The launches of one round."""

    def __init__(self, root: str, cell: Cell, blows: list[Blow], name: str, references: References,
                 server: Server | None):
        self.root, self.cell, self.blows, self.name, self.server = root, cell, blows, name, server
        self.references, self.result = references, Result(str(cell))
        self.scratch = os.path.join(root, "rounds", name)
        shutil.rmtree(self.scratch, ignore_errors=True)
        os.makedirs(self.scratch)
        remote = cell.storage == "s3"
        runs = f"s3://bucket/{name}" if remote else self.scratch
        self.url = f"{runs}/run"
        data = "s3://bucket/data" if remote else os.path.join(root, "data")
        self.config = references.write_config(cell.config(data, runs, "run", os.path.join(self.scratch, "staging")),
                                              os.path.join(self.scratch, "run.yaml"))

    def play(self) -> Result:
        began, result = time.monotonic(), self.result
        try:
            over = any(self._struck(blow) for blow in self.blows)
            if over or self._finish():
                result.differences += self.references.compare(self.cell, self.url, self._output("compare"))
            else:
                result.differences.append("the run could not be brought to its end")
        except ChildFailed as error:  # of a run that cannot be read, or has no equal
            result.differences.append(str(error))
        result.seconds = round(time.monotonic() - began, 1)
        if not result.differences:
            shutil.rmtree(self.scratch, ignore_errors=True)
        return result

    def _output(self, what: str) -> str:
        return os.path.join(self.scratch, f"{what}.out")

    def _launch(self, ranks: int, **deadly) -> Ranks:
        self.result.launches += 1
        return Ranks(["--config", self.config], ranks, self._output(f"launch-{self.result.launches}"), **deadly)

    def _finish(self) -> bool:
        for _ in range(_TRIES):
            launch = self._launch(self.blows[-1].ranks)
            if not launch.wait():
                self.result.differences.append(f"launch {self.result.launches} stood still")
                return False
            if launch.finished:
                return True
            if "start again" not in launch.text().lower():
                return False
        return False

    def _struck(self, blow: Blow) -> bool:
        """One launch with its blow; whether the run came to its end all the same."""
        usual = self.references.usual(self.cell, blow.ranks)
        far = _REACH * (blow.at if self.result.kills else 0.5 + blow.at / 2)  # the first one after something was saved
        event = 1 + int(far * usual["events"][blow.victim]) if blow.kill == "event" else 0
        if blow.disturbance:
            event = 0
        launch = self._launch(blow.ranks, deadly=event, victim=blow.victim, everybody=blow.everybody)
        if not event:
            self._wait_until(launch, (0.1 + far) * usual["seconds"])
        if blow.disturbance and self._disturb(launch, blow):
            self.result.faults += 1
            self.result.met.append(blow.disturbance)
        if not event and blow.disturbance != "term":
            launch.signal(signal.SIGKILL, None if blow.everybody else blow.victim)
        if not launch.wait():
            self.result.differences.append(f"launch {self.result.launches} stood still after {blow}")
        self._count(launch, blow)
        if blow.harm and not launch.finished:
            harmed = in_child(lambda: harm_something(self.url, blow.harm, blow.at), self._output("harm"))
            self.result.faults += bool(harmed)
            self.result.met += [f"{blow.harm} {harmed}"] if harmed else []
        stopped = "stopped as asked" in launch.text()
        return launch.finished and not stopped

    @staticmethod
    def _wait_until(launch: Ranks, seconds: float) -> None:
        while time.monotonic() - launch.began < seconds and not launch.poll():
            time.sleep(0.005)

    def _disturb(self, launch: Ranks, blow: Blow) -> bool:
        """Something else than a kill; whether the launch was there to meet it."""
        if launch.poll():
            return False
        if blow.disturbance == "pause":
            launch.signal(signal.SIGSTOP, blow.victim)
            time.sleep(0.5)
            launch.signal(signal.SIGCONT, blow.victim)
        elif blow.disturbance == "term":
            launch.signal(signal.SIGTERM, blow.victim)
        elif blow.disturbance == "full_disk":
            for pid in launch.pids:
                if pid not in launch.codes:
                    resource.prlimit(pid, resource.RLIMIT_FSIZE, (_FILE_LIMIT, resource.RLIM_INFINITY))
        elif self.server is not None:
            (self.server.outage if blow.disturbance == "outage" else self.server.freeze)(1.0)
        self._wait_until(launch, time.monotonic() - launch.began + 0.5)
        return True

    def _count(self, launch: Ranks, blow: Blow) -> None:
        if not launch.killed:
            return
        committed = "resuming from" in launch.text() or bool(
            glob.glob(os.path.join(self.url, "checkpoints", "*", "COMMIT.json")))
        self.result.kills += committed
        self.result.early += not committed
        self.result.events.append(launch.events.last(blow.victim))
        if len(launch.pids) > 1 and launch.killed == 1:
            self.result.survived.append(round(launch.ended[-1] - launch.ended[0], 1))

