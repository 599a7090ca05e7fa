"""Images delivered to the training process, against a bare decoding loop and against torchvision's ImageFolder.

All three decode the same JPEGs of 500×375, cut a random box and resize it to 224×224:
  lacuna       EpochStream over real shards: tar reads, labels, recorded boxes, flips and whole batches included
  bare         threads that decode, cut and resize bytes already in memory with the faster of two decoders, and
               throw the result away: the most that these cores can do
  imagefolder  torchvision ImageFolder + PIL transforms in a DataLoader's processes, flips and batches of uint8
Ratios: vs_bare_loop and vs_imagefolder, images/s of lacuna ÷ images/s of the other, all with the same number of
workers. The three take turns, so that a busy machine slows all of them; a ratio is the median over the rounds.
The images are made up (smooth fields, edges and noise); with LACUNA_EVAL_DATA set, they are mosaics of the real
photos in its folder coco_photos.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import simplejpeg
import torch
import torchvision
from PIL import Image
from torchvision import transforms
from torchvision.io import ImageReadMode, decode_jpeg

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.augment import Augment
from lacuna.data_pipelines.packing import SIDECAR_NAME, Layout, pack
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.readers import folder
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.stream import EpochStream, SampleMaker

SIZE = 224
SCALE = (0.25, 1.0)
HEIGHT, WIDTH = 375, 500
CLASSES = 8
STREAMS = 4
ROWS_PER_SHARD = 128
_QUALITY = 90
_QUICK_SECONDS = 28  # no further round begins after this; imports and the processes' end come on top
Boxes = list[tuple[int, int, int, int]]  # top, left, height, width


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--images", type=int, help="images an epoch (default 1536; quick 640)")
    parser.add_argument("--rounds", type=int, help="turns of the three contenders (default 25; quick 15)")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)),
                        help="threads or processes of each contender (default: the cores, here %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="default 64")


def run(quick: bool, args: argparse.Namespace) -> dict:
    end = time.monotonic() + (_QUICK_SECONDS if quick else float("inf"))
    count, rounds = args.images or (640 if quick else 1536), args.rounds or (15 if quick else 25)
    if min(count, rounds, args.workers, args.batch) < 1 or args.batch % STREAMS:
        raise UserError(f"--images, --rounds and --workers must be above 0, --batch a multiple of {STREAMS}.")
    with tempfile.TemporaryDirectory(prefix="lacuna-bench-") as scratch:
        photos, origin = make_photos(min(count, 64 if quick else 256))
        write_folder(photos, Path(scratch, "images"), count)
        loader = image_folder_loader(f"{scratch}/images", args.workers, args.batch)
        pack(folder.read(f"{scratch}/images"), f"{scratch}/shards", Layout(STREAMS, rows_per_shard=ROWS_PER_SHARD))
        encoded = [photos[i % len(photos)] for i in range(count)]
        boxes = random_boxes(count)
        decoder, decode = fastest_decoder(photos)
        source = ShardSource.load(f"{scratch}/shards", SIDECAR_NAME, None)
        contenders: dict[str, Callable[[int], int]] = {
            "lacuna": lambda turn: stream_epoch(source, turn, args.workers, args.batch),
            "bare": lambda turn: bare_loop(decode, encoded, boxes, args.workers),
            "imagefolder": lambda turn: sum(len(images) for images, _ in loader),
        }
        rates, delivered = take_turns(contenders, rounds, end)
    median = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "ratios": {f"vs_{label}": round(statistics.median(
            ours / other for ours, other in zip(rates["lacuna"], rates[name], strict=True)), 3)
            for label, name in (("bare_loop", "bare"), ("imagefolder", "imagefolder"))},
        "images_per_second": {name: round(value, 1) for name, value in median.items()},
        "images": origin, "mean_bytes": round(statistics.mean(map(len, photos))), "epoch": count,
        "delivered": delivered, "rounds": len(rates["lacuna"]),
        "workers": args.workers, "batch": args.batch, "bare_decoder": decoder,
    }


def take_turns(contenders: dict[str, Callable[[int], int]], rounds: int,
               end: float) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Images/s of every contender in every round, and its images in all; round 0 warms up, and three are counted even
    after the end."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    delivered = dict.fromkeys(contenders, 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each contender has its own workers; torch must not add threads to one of them
    for turn in range(rounds + 1):
        if turn > 3 and time.monotonic() > end:
            break
        names = list(contenders)[:: 1 if turn % 2 else -1]
        for name in names:
            start = time.perf_counter()
            images = contenders[name](turn)
            rate = images / (time.perf_counter() - start)
            if turn:
                rates[name].append(rate)
                delivered[name] += images
        if turn:
            print(f"round {turn}: " + ", ".join(f"{name} {rates[name][-1]:,.0f} images/s" for name in contenders),
                  flush=True)
    torch.set_num_threads(threads)
    return rates, delivered


def stream_epoch(source: ShardSource, epoch: int, workers: int, batch: int) -> int:
    plan = EpochPlan(source.counts, 0, epoch, STREAMS, batch)
    maker = SampleMaker(Augment(SIZE, crop="random_resized", scale=SCALE, flip=True), 0, epoch)
    with EpochStream(source, plan, plan.rank_streams(0, 1), maker, workers=workers) as stream:
        return sum(len(batch) for batch in stream)


def bare_loop(decode: Callable[[bytes], torch.Tensor], encoded: list[bytes], boxes: Boxes, workers: int) -> int:
    def work(part: int) -> None:
        for data, (top, left, height, width) in zip(encoded[part::workers], boxes[part::workers], strict=True):
            cut = decode(data)[None, :, top : top + height, left : left + width]
            torch.nn.functional.interpolate(cut, (SIZE, SIZE), mode="bilinear", antialias=True)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))  # a list, so that errors surface
    return len(encoded)


def random_boxes(count: int) -> Boxes:
    """Drawn before the clock runs, as torchvision draws them."""
    image = torch.empty((3, HEIGHT, WIDTH), dtype=torch.uint8)
    return [transforms.RandomResizedCrop.get_params(image, SCALE, (3 / 4, 4 / 3)) for _ in range(count)]


def _by_simplejpeg(data: bytes) -> torch.Tensor:
    return torch.from_numpy(simplejpeg.decode_jpeg(data)).permute(2, 0, 1)


def _by_torchvision(data: bytes) -> torch.Tensor:
    return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)


def fastest_decoder(photos: list[bytes]) -> tuple[str, Callable[[bytes], torch.Tensor]]:
    """The decoder with the smaller sum of best times: each image's best of ten, which a busy machine hardly changes."""
    decoders = (_by_simplejpeg, _by_torchvision)
    best = np.full((len(decoders), min(len(photos), 24)), np.inf)
    for _ in range(10):
        for d, decode in enumerate(decoders):
            for i, data in enumerate(photos[: best.shape[1]]):
                start = time.perf_counter()
                decode(data)
                best[d, i] = min(best[d, i], time.perf_counter() - start)
    chosen = decoders[int(best.sum(axis=1).argmin())]
    return chosen.__name__.removeprefix("_by_"), chosen


def image_folder_loader(images: str, workers: int, batch: int) -> torch.utils.data.DataLoader:
    """The usual loader; its processes start here and stay alive between turns, so their start is not timed."""
    transform = transforms.Compose([transforms.RandomResizedCrop(SIZE, scale=SCALE), transforms.RandomHorizontalFlip(),
                                    transforms.PILToTensor()])
    # Forking is DataLoader's default and quick, but safe only while there are no other threads.
    context = "fork" if threading.active_count() == 1 else "forkserver"
    loader = torch.utils.data.DataLoader(
        torchvision.datasets.ImageFolder(images, transform), batch, shuffle=True, num_workers=workers,
        persistent_workers=True, multiprocessing_context=context, prefetch_factor=4)
    iter(loader)
    return loader


def write_folder(photos: list[bytes], root: Path, count: int) -> None:
    """`count` files in one subfolder a class; photos are used again when they run out."""
    for i in range(count):
        path = root / f"class-{i % CLASSES}" / f"{i:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photos[i % len(photos)])


def make_photos(count: int) -> tuple[list[bytes], str]:
    """JPEGs of HEIGHT × WIDTH and where they come from."""
    real = Path(os.environ.get("LACUNA_EVAL_DATA", os.devnull), "coco_photos", "train")
    names = sorted(real.glob("*.jpg")) if real.is_dir() else []
    rng = np.random.default_rng(0)
    if names:
        return [encode(mosaic(names, rng)) for _ in range(count)], "mosaics of real photos"
    return [encode(scene(rng)) for _ in range(count)], "made up"


def mosaic(names: list[Path], rng: np.random.Generator) -> np.ndarray:
    """Photos side by side: their detail at the size that the other contenders are known for."""
    tiles = []
    for name in rng.choice(np.array(names, dtype=object), 12):
        with Image.open(name) as picture:
            tiles.append(np.asarray(picture.convert("RGB").resize((160, 160))))
    rows = [np.concatenate(tiles[start : start + 4], axis=1) for start in range(0, 12, 4)]
    return np.concatenate(rows)[:HEIGHT, :WIDTH]


def scene(rng: np.random.Generator) -> np.ndarray:
    """Smooth fields at several scales, a few hard-edged shapes and sensor noise."""
    canvas = np.full((HEIGHT, WIDTH, 3), 128.0, np.float32)
    for cells in (3, 12, 48, 160):
        field = rng.normal(0, 1, (cells, cells, 3)).astype(np.float32)
        for channel in range(3):
            grown = Image.fromarray(field[..., channel]).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC)
            canvas[..., channel] += 90 / cells**0.5 * np.asarray(grown)
    for _ in range(12):
        top, left = rng.integers(0, HEIGHT - 20), rng.integers(0, WIDTH - 20)
        height, width = rng.integers(10, 150, 2)
        canvas[top : top + height, left : left + width] += rng.normal(0, 40, 3)
    canvas += rng.normal(0, 6, (HEIGHT, WIDTH, 1))
    return canvas.clip(0, 255).astype(np.uint8)


def encode(image: np.ndarray) -> bytes:
    return simplejpeg.encode_jpeg(np.ascontiguousarray(image), quality=_QUALITY, colorsubsampling="420")
