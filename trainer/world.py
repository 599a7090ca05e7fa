"""This process among its peers: rank, device, small collectives, and a watchdog that names a rank that hangs."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from lacuna.trainer.peers import Peers

log = logging.getLogger("lacuna")
START_UP_SECONDS = 300  # models, engines and first steps take long on a busy machine, however short the timeout is
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # what a launcher tells a rank
HUNG_EXIT_CODE = 75  # "temporary failure": what a scheduler may simply start again


class PeersMissing(RuntimeError):
    """The ranks of this launch did not find each other, or lost each other; the text is one sentence."""


class World:
    """Built once per process, after `start`; without a process group, a world of one."""

    def __init__(self, device: torch.device, timeout_seconds: float = 600):
        self.rank, self.size, self.device = 0, 1, device
        self.leads_node = os.environ.get("LOCAL_RANK", "0") == "0"  # one rank a node does what is done once a node
        self.control: Any = None
        if not dist.is_initialized():
            return
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        wait = _group_timeout(timeout_seconds)
        # Counts and flags travel over gloo even on GPUs: reading them then never waits for the device.
        self.control = dist.new_group(backend="gloo", timeout=wait)

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum_counts(self, *counts: float) -> list[float]:
        """Sums over all ranks; one tiny all-reduce."""
        if self.size == 1:
            return [float(count) for count in counts]
        packed = torch.tensor(counts, dtype=torch.float64)
        dist.all_reduce(packed, group=self.control)
        return packed.tolist()

    def gather(self, item: Any) -> list[Any]:
        """Every rank's item, on every rank."""
        if self.size == 1:
            return [item]
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self.control)
        return items

    def broadcast(self, item: Any) -> Any:
        """Rank 0's item, on every rank."""
        if self.size == 1:
            return item
        box = [item]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def seed(self, number: int) -> None:
        """The draws of this process, on the host and on its device (torch's own would stack up calls for others)."""
        torch.default_generator.manual_seed(number)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(number)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)

    def all_gather(self, value: torch.Tensor) -> torch.Tensor:
        """[W, …]: every rank's tensor, equal in shape, on every rank; not differentiable."""
        if self.size == 1:
            return value.detach()[None]
        value = value.detach().contiguous()
        out = value.new_empty((self.size, *value.shape))
        dist.all_gather(list(out.unbind(0)), value)
        return out

    def share_buffers(self, model: torch.nn.Module) -> None:
        """Rank 0's buffers (BatchNorm statistics) on every rank."""
        for buffer in model.buffers() if self.size > 1 else ():
            dist.broadcast(buffer, src=0)

    def global_sum(self, value: torch.Tensor) -> torch.Tensor:
        """Differentiable sum over ranks of a tensor from which every rank computes the same scalar."""
        return value if self.size == 1 else _GlobalSum.apply(value, self.size)


class _GlobalSum(torch.autograd.Function):
    """Every rank derives the same scalar from the sum, so the gradients that would be summed are all equal."""

    @staticmethod
    def forward(ctx, value, size):
        ctx.size = size
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.size, None


def start(timeout_seconds: float) -> World:
    """Join the process group that the launcher describes, or make a group of one."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if "RANK" not in os.environ:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": os.environ.get("LOCAL_RANK", "0"),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    # The op would be compiled on first use (~45 s, fragile); gloo serves CPU ranks well.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    wait = _group_timeout(timeout_seconds)
    accelerator = get_accelerator()
    backend = accelerator.communication_backend_name() if accelerator.is_available() and (
        accelerator.device_name() != "cpu") else "gloo"
    with _meeting(timeout_seconds):
        deepspeed.init_distributed(dist_backend=backend, timeout=wait, verbose=False)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    on_cpu = accelerator.device_name() == "cpu"
    device = torch.device("cpu") if on_cpu else torch.device(accelerator.device_name(local_rank))
    if not on_cpu:
        accelerator.set_device(local_rank)
    return World(device, timeout_seconds)


@contextlib.contextmanager
def joined(timeout_seconds: float) -> Iterator[World]:
    """`start`, and afterwards this process is as it was: a group of one is given up, one of several goes on."""
    before = {name: os.environ.get(name) for name in _VARIABLES}
    own = before["RANK"] is None and not dist.is_initialized()
    try:
        yield start(timeout_seconds)
    finally:
        if own and dist.is_initialized():
            import deepspeed.comm

            deepspeed.comm.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)


@contextlib.contextmanager
def on_its_own() -> Iterator[None]:
    """A process that is in no group takes what a launcher has told another one, and it has inherited, for nothing."""
    inherited = {} if dist.is_initialized() else {name: os.environ.pop(name) for name in _VARIABLES
                                                  if name in os.environ}
    try:
        yield
    finally:
        os.environ |= inherited


@contextlib.contextmanager
def _meeting(timeout_seconds: float) -> Iterator[None]:
    """Of all ranks at the first one's address: whoever waits in vain says so, in time and in one sentence."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    text = (f"rank {rank} did not meet all {size} ranks of this launch at {where} within {timeout_seconds:.0f} s "
            "(train.timeout_seconds): another rank died before it came there, or cannot reach it. Start again.")

    def give_up() -> None:
        print(f"lacuna: {text}", file=sys.stderr, flush=True)
        os._exit(HUNG_EXIT_CODE)

    timer = threading.Timer(timeout_seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except dist.DistError as error:
        raise PeersMissing(f"{text} ({str(error).splitlines()[0]})") from error
    finally:
        timer.cancel()


_LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting",
         "Connection refused")


def lost_peer(error: Exception) -> str | None:
    """What a collective says when another rank is gone, in one sentence; None if the error is something else."""
    if isinstance(error, PeersMissing):
        return str(error)
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and any(w in str(error) for w in _LOST)):
        return (f"the connection to another rank is lost ({str(error).splitlines()[0]}): see what that one said. Start "
                "again to resume.")
    return None


def _group_timeout(timeout_seconds: float) -> datetime.timedelta:
    """Longer than the watchdog's: a collective that gives up can only say that somebody is missing, not who."""
    return datetime.timedelta(seconds=2 * max(timeout_seconds, START_UP_SECONDS) + 30)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Watchdog:
    """Tells when this rank's loop stands still for `timeout`, and which rank is behind; by default it ends the process.

    The main thread calls `beat` as it makes progress; one thread publishes the beats through the group's store, another
    watches the main thread. A rank that is stopped or stuck outside of collectives publishes nothing new, so the
    others, waiting for it in a collective, see who it is. Rank 0 keeps the store: if it is stopped, the store is
    silent, which is why the watching thread never waits for it. A rank may wait longer while a peer still makes
    progress (one has more validation shards than the other): it gives up only if nobody moved in the second half.
    While something is built, until the first step after it, the timeout is START_UP_SECONDS at least.
    """

    def __init__(self, world: World, timeout_seconds: float, hung: Callable[[str], None] | None = None):
        self.world, self.timeout, self.hung = world, timeout_seconds, hung or end_process
        self.beats, self.where, self.last = 0, "start-up", time.monotonic()
        self.patience = max(timeout_seconds, START_UP_SECONDS)
        store = dist.distributed_c10d._get_default_store()
        self.store = dist.PrefixStore("lacuna/watchdog", store)
        self.peers: list[tuple[int, str]] = []  # beats and place of every rank, when last asked
        self.answered = time.monotonic()  # when the store did so
        self.half_way: int | None = None  # beats of all ranks when half of the wait was over
        self.stopped = threading.Event()
        self.threads = [threading.Thread(target=work, name=name, daemon=True)
                        for name, work in (("watchdog-store", self._publish), ("watchdog", self._watch))]
        for thread in self.threads:
            thread.start()
        self.neighbors = Peers(world, lambda why: None if self.stopped.is_set() else self.hung(why))

    @property
    def interval(self) -> float:
        return min(1.0, self.timeout / 5)

    def beat(self, where: str, building: bool = False) -> None:
        """`building`: the next beat may take as long as a start-up."""
        self.patience = max(self.timeout, START_UP_SECONDS) if building else self.timeout
        self.beats, self.where, self.last = self.beats + 1, where, time.monotonic()

    def stop(self, whole: bool = True) -> None:
        """After an error (not `whole`) a peer and its store may be gone: nobody waits, and its death is still told."""
        self.stopped.set()
        if whole:
            self.neighbors.stop()
            for thread in self.threads:
                thread.join(timeout=5)

    def _publish(self) -> None:
        """Tell where this rank is; ask where the others are, once that matters."""
        while not self.stopped.is_set():
            try:
                self.store.set(str(self.world.rank), f"{self.beats}\t{self.where}")
                if time.monotonic() - self.last > self.patience / 4:
                    self.peers = [self._state(rank) for rank in range(self.world.size)]
                self.answered = time.monotonic()
            except RuntimeError:
                return  # rank 0 and its store are gone: the collectives report that themselves
            self.stopped.wait(self.interval)

    def _state(self, rank: int) -> tuple[int, str]:
        if not self.store.check([str(rank)]):
            return -1, "never"
        beats, _, where = self.store.get(str(rank)).decode().partition("\t")
        return int(beats), where

    def _watch(self) -> None:
        while not self.stopped.wait(self.interval):
            waited = time.monotonic() - self.last
            beats = sum(beats for beats, _ in self.peers)
            if waited < self.patience / 2:
                self.half_way = None
            elif self.half_way is None:
                self.half_way = beats
            elif waited > self.patience:
                if beats == self.half_way:
                    self._give_up()
                    return
                self.half_way, self.last = beats, time.monotonic() - self.patience / 2

    def _give_up(self) -> None:
        behind = min((beats for beats, _ in self.peers), default=0)
        names = [f"rank {rank} (last seen: {where})" for rank, (beats, where) in enumerate(self.peers)
                 if beats == behind]
        if time.monotonic() - self.answered > self.patience / 2:
            names = ["rank 0 (its process, which keeps the group's store, does not answer)"]
        self.hung(f"rank {self.world.rank} made no progress for {self.patience:.0f} s (train.timeout_seconds) at "
                  f"{self.where}. Waiting for: {', '.join(names)}. Ending this launch; start it again to resume.")


def end_process(why: str) -> None:
    """A rank that hangs in a collective cannot be ended otherwise."""
    print(f"lacuna: {why}", file=sys.stderr, flush=True)
    os._exit(HUNG_EXIT_CODE)
