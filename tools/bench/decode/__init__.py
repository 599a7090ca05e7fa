"""Images delivered to the training process, against a bare decoding loop and against other people's loaders.

All decode the same JPEGs, cut a random box, resize it to 224×224 with antialiasing, flip half of them and hand over
uint8 batches: lacuna, SPDL, DALI (CPU), WebDataset's loader, a DataLoader with torchvision v2 transforms; `bare` is
threads that decode (with the fastest decoder of all), cut and resize bytes in memory and throw the result away.
Those that are not installed (`pip install lacuna-trainer[peers]`) are listed under `not_run`. Ratios, images/s of
lacuna ÷ images/s of the other with the same number of workers; they take turns, a ratio is the median over the turns:
  vs_bare_loop           at 500×375 [≥ 0.95]
  vs_best_peer           at 500×375, against the peer with the highest median [≥ 1.0]; `spread` has its quartiles
  vs_best_peer_large     at 1024×768, everybody with scaled decoding who has it [≥ 1.0]
  scaled_vs_exact_large  lacuna with scaled decoding ÷ without, at 1024×768 [≥ 1.3]
--quick keeps the two fastest peers of the first turn that counts. `same_work` has, for each, the mean difference in
levels of the average picture of whole images to ours: what is delivered is the same. The images are made up (smooth
fields, edges and noise); with LACUNA_EVAL_DATA set, they are mosaics of the real photos in its folder coco_photos.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import folder
from lacuna.tools.bench.decode import contenders
from lacuna.tools.bench.decode.contenders import SIZE, STREAMS, Batches, Work
from lacuna.tools.bench.decode.pictures import Size, make_photos, random_boxes, write_folder
from lacuna.tools.bench.peers import Peers

SCALE, RATIO = (0.25, 1.0), (3 / 4, 4 / 3)
SMALL, LARGE = (375, 500), (768, 1024)
ROWS_PER_SHARD = 128
MAKERS = {"torchvision": ("torchvision", contenders.torchvision_loader),
          "webdataset": ("webdataset", contenders.webdataset_loader),
          "spdl": ("spdl_io", contenders.spdl_loader), "dali": ("nvidia-dali-cuda120", contenders.dali_loader)}
_QUICK_SECONDS = {SMALL: 20, LARGE: 32}  # since the start: no further turn begins after this
Rates = dict[str, list[float]]


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", type=int, help="per turn (default 1024; quick 384; of the large ones a quarter)")
    parser.add_argument("--rounds", type=int, help="turns of each contender (default 21; quick 15)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)),
                        help="threads or processes of each contender (default: the cores, here %(default)s)")
    parser.add_argument("--batch", type=int, default=32, help="default 32")


def run(quick: bool, args: argparse.Namespace) -> dict:
    count, rounds = args.images or (384 if quick else 1024), args.rounds or (15 if quick else 21)
    if min(count, rounds, args.workers) < 1 or args.batch < 1 or args.batch % STREAMS or count < args.batch:
        raise UserError(f"--images, --rounds and --workers must be above 0, --batch a multiple of {STREAMS} and at "
                        "most --images.")
    started, threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)  # each contender has its own workers; torch must not add threads to one of them
    found: dict = {"ratios": {}, "workers": args.workers, "batch": args.batch}
    for size in (SMALL, LARGE):
        images = count if size == SMALL else max(args.batch, count // 4 // args.batch * args.batch)
        end = started + _QUICK_SECONDS[size] if quick else float("inf")
        with tempfile.TemporaryDirectory(prefix="lacuna-bench-") as scratch:
            case = Case(scratch, size, images, args, quick)
            rates = case.take_turns(rounds, end)
        found |= case.facts(rates)
        found["ratios"] |= case.ratios(rates)
    torch.set_num_threads(threads)
    return found


class Case:
    """One size of pictures and all who decode them."""

    def __init__(self, scratch: str, size: Size, count: int, args: argparse.Namespace, quick: bool):
        self.label, self.quick, self.peers = "" if size == SMALL else "_large", quick, Peers()
        photos, self.origin = make_photos(min(count, 48 if quick else 128), size)
        self.mean_bytes = round(statistics.mean(map(len, photos)))
        write_folder(photos, Path(scratch, "images"), count)
        pack(folder.read(f"{scratch}/images"), f"{scratch}/shards", Layout(STREAMS, rows_per_shard=ROWS_PER_SHARD))
        encoded = [photos[i % len(photos)] for i in range(count)]
        self.work = Work(scratch, encoded, random_boxes(count, size, SCALE, RATIO), size, SCALE, RATIO, size == LARGE,
                         args.workers, args.batch)
        peers = self.peers.build({name: (where, partial(make, self.work)) for name, (where, make) in MAKERS.items()})
        self.same_work = self._same_work(peers) if size == SMALL else {}
        self.decoder, decode = fastest_decoder(photos)
        self.all: dict[str, Batches] = {"lacuna": contenders.lacuna(self.work),
                                        "bare": contenders.bare(self.work, decode), **peers}
        if self.work.scaled:
            self.all["exact"] = contenders.lacuna(Work(**{**vars(self.work), "scaled": False}))
        self.delivered = dict.fromkeys(self.all, 0)

    @property
    def rivals(self) -> list[str]:
        return [name for name in MAKERS if name in self.all]

    def take_turns(self, rounds: int, end: float) -> Rates:
        """Images/s of each in every turn; turn 0 warms up, turn 1 chooses the peers of the quick form; three are
        counted even after the end."""
        rates: Rates = {}
        for turn in range(rounds + 1):
            if turn > 3 and time.monotonic() > end:
                break
            now = {name: self._rate(name, turn) for name in list(self.all)[:: 1 if turn % 2 else -1]}
            if turn == 0:
                continue
            if turn == 1:  # by now all workers have started
                for name in sorted(self.rivals, key=lambda name: now[name])[: -2 if self.quick else 0]:
                    del self.all[name], self.delivered[name]
                rates = {name: [] for name in self.all}
            for name in self.all:
                rates[name].append(now[name])
            print(f"{self.work.size[1]}×{self.work.size[0]}, turn {turn}: " + ", ".join(
                f"{name} {now[name]:,.0f} images/s" for name in self.all), flush=True)
        return rates

    def _rate(self, name: str, turn: int) -> float:
        start = time.perf_counter()
        images = sum(len(batch) for batch in self.all[name](turn))
        if turn:
            self.delivered[name] += images
        return images / (time.perf_counter() - start)

    def _same_work(self, peers: dict[str, Batches]) -> dict[str, float]:
        """Mean difference of every peer's average picture to ours when all boxes are the whole image."""
        height, width = self.work.size
        whole = Work(**{**vars(self.work), "scale": (1.0, 1.0), "ratio": (width / height,) * 2, "scaled": False,
                        "boxes": [(0, 0, height, width)] * len(self.work.boxes)})
        ours, differences = average_picture(contenders.lacuna(whole)), {}
        for name in list(peers):
            picture = average_picture(MAKERS[name][1](whole))
            differences[name] = round(float(np.abs(picture - ours).mean()), 2)
        return differences

    def ratios(self, rates: Rates) -> dict[str, float]:
        found = {"vs_bare_loop" + self.label: self._ratio(rates, "bare")}
        if self.rivals:
            found["vs_best_peer" + self.label] = self._ratio(rates, self._best(rates))
        if "exact" in rates:
            found["scaled_vs_exact_large"] = self._ratio(rates, "exact")
        return found

    def _best(self, rates: Rates) -> str:
        return max(self.rivals, key=lambda name: statistics.median(rates[name]))

    def _ratio(self, rates: Rates, other: str) -> float:
        return round(statistics.median(a / b for a, b in zip(rates["lacuna"], rates[other], strict=True)), 3)

    def facts(self, rates: Rates) -> dict:
        quarters = {name: [round(float(np.quantile(np.divide(rates["lacuna"], values), q)), 3) for q in (0.25, 0.75)]
                    for name, values in rates.items() if name != "lacuna"}
        facts = {"images_per_second": {name: round(statistics.median(v), 1) for name, v in rates.items()},
                 "vs_each": {name: self._ratio(rates, name) for name in quarters}, "spread": quarters,
                 "delivered": self.delivered, "turns": len(rates["lacuna"]), "epoch": len(self.work.encoded),
                 "mean_bytes": self.mean_bytes, "images": self.origin, "bare_decoder": self.decoder,
                 **({"best_peer": self._best(rates)} if self.rivals else {}), **self.peers.facts(),
                 **({"same_work": self.same_work} if self.same_work else {})}
        return {"large" if self.label else "small": facts}


def average_picture(batches: Batches) -> np.ndarray:
    """float [SIZE, SIZE, 3] over one turn, together with its mirror image: neither order nor flips matter."""
    total, count = np.zeros((SIZE, SIZE, 3)), 0
    for batch in batches(0):
        pictures = batch if batch.shape[-1] == 3 else batch.permute(0, 2, 3, 1)
        total += pictures.double().sum(0).numpy()
        count += len(pictures)
    return (total + total[:, ::-1]) / (2 * count)


def fastest_decoder(photos: list[bytes]) -> tuple[str, contenders.Decode]:
    """The decoder with the smaller sum of best times: each image's best of ten, which a busy machine hardly changes.

    FFmpeg's took 1.5 times as long as libjpeg-turbo's where SPDL was measured, and DALI's cannot be called alone.
    """
    decoders: tuple[Callable, ...] = (contenders.by_simplejpeg, contenders.by_torchvision)
    best = np.full((len(decoders), min(len(photos), 16)), np.inf)
    for _ in range(10):
        for d, decode in enumerate(decoders):
            for i, data in enumerate(photos[: best.shape[1]]):
                start = time.perf_counter()
                decode(data)
                best[d, i] = min(best[d, i], time.perf_counter() - start)
    chosen = decoders[int(best.sum(axis=1).argmin())]
    return chosen.__name__.removeprefix("by_"), chosen
