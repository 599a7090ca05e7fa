"""Who takes part in `lacuna bench decode`. Each turns the same JPEGs into uint8 batches of SIZE × SIZE in this process:
decode, random box, antialiased bilinear resize, flip; with the fastest settings that its documentation offers.

Bytes: ours and WebDataset's come from the same tars, torchvision's from files; SPDL's and DALI's from memory, which is
in their favour. Scaled decoding (libjpeg's or FFmpeg's DCT scaling): ours, WebDataset's (by simplejpeg, which it is
given) and SPDL's (`lowres`); torchvision's decoder and DALI's CPU one have none, DALI decodes only the rows of its box.
"""

from __future__ import annotations

import glob
import multiprocessing.context
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import simplejpeg
import torch
import torchvision
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from lacuna.data_pipelines.augment import Augment
from lacuna.data_pipelines.packing import SIDECAR_NAME
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.sample_maker import SampleMaker
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.stream import EpochStream
from lacuna.tools.bench.decode.pictures import Boxes, Size

SIZE = 224
STREAMS = 4
Batches = Callable[[int], Iterator[torch.Tensor]]  # turn → uint8 [B, 3, SIZE, SIZE] or [B, SIZE, SIZE, 3]


@dataclass(frozen=True)
class Work:
    """What all contenders have to do."""

    folder: str  # images/ and shards/
    encoded: list[bytes]
    boxes: Boxes
    size: Size
    scale: tuple[float, float]
    ratio: tuple[float, float]
    scaled: bool
    workers: int
    batch: int

    def factor(self, box: tuple[int, int, int, int]) -> int:
        """How many times smaller the image may be decoded for this box."""
        allowed = min(box[2], box[3]) / SIZE if self.scaled else 1
        return 8 if allowed >= 8 else 4 if allowed >= 4 else 2 if allowed >= 2 else 1


def lacuna(work: Work) -> Batches:
    """EpochStream over real shards: tar reads, labels, recorded boxes and reproducible draws included."""
    source = ShardSource.load(f"{work.folder}/shards", SIDECAR_NAME, None)
    augment = Augment(SIZE, crop="random_resized", scale=work.scale, ratio=work.ratio, flip=True,
                      scaled_decode=work.scaled)

    def batches(turn: int) -> Iterator[torch.Tensor]:
        plan = EpochPlan(source.counts, 0, turn, STREAMS, work.batch)
        with EpochStream(source, plan, plan.rank_streams(0, 1), SampleMaker(augment, 0, turn),
                         workers=work.workers) as stream:
            for batch in stream:
                yield batch.inputs

    return batches


def bare(work: Work, decode: Decode) -> Batches:
    """Threads that decode, cut and resize bytes in memory and throw the result away: the most that the cores can do."""
    def part(first: int) -> int:
        pairs = list(zip(work.encoded, work.boxes, strict=True))[first :: work.workers]
        for data, box in pairs:
            cut(decode(data, work.factor(box)), box, work.factor(box))
        return len(pairs)

    def batches(turn: int) -> Iterator[torch.Tensor]:
        with ThreadPoolExecutor(work.workers) as pool:
            for count in pool.map(part, range(work.workers)):
                yield torch.empty(count)

    return batches


Decode = Callable[[bytes, int], torch.Tensor]  # at 1/factor of its sides → [3, H, W]


def by_simplejpeg(data: bytes, factor: int = 1) -> torch.Tensor:
    least = {}
    if factor > 1:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        least = {"min_height": -(-height // factor), "min_width": -(-width // factor)}
    return torch.from_numpy(simplejpeg.decode_jpeg(data, **least)).permute(2, 0, 1)


def by_torchvision(data: bytes, factor: int = 1) -> torch.Tensor:
    return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)


def cut(image: torch.Tensor, box: tuple[int, int, int, int], factor: int = 1) -> torch.Tensor:
    top, left, height, width = (v // factor for v in box)
    part = image[None, :, top : top + height, left : left + width]
    return torch.nn.functional.interpolate(part, (SIZE, SIZE), mode="bilinear", antialias=True)[0]


def _read_jpeg(path: str) -> torch.Tensor:
    with open(path, "rb") as f:
        return by_torchvision(f.read())


def torchvision_loader(work: Work) -> Batches:
    """ImageFolder, torchvision's decoder and v2 transforms in a DataLoader's processes, which live between turns."""
    transform = v2.Compose([v2.RandomResizedCrop(SIZE, scale=work.scale, ratio=work.ratio, antialias=True),
                            v2.RandomHorizontalFlip()])
    folder = torchvision.datasets.ImageFolder(f"{work.folder}/images", transform, loader=_read_jpeg)
    loader = torch.utils.data.DataLoader(
        folder, work.batch, shuffle=True, num_workers=work.workers, persistent_workers=True,
        multiprocessing_context=_context(), prefetch_factor=4)
    iter(loader)  # starts the processes, so that their start is not timed
    return lambda turn: (images for images, _ in loader)


def _context() -> multiprocessing.context.ForkServerContext:
    """Workers from a server that has imported everything: as quick as forking this process, whose libraries have
    threads of their own by now, with which forked workers hung."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


@dataclass(frozen=True)
class WebDatasetSample:
    """Bytes to pixels in a WebDataset worker."""

    work: Work

    def __call__(self, sample: dict) -> torch.Tensor:
        box = random.choice(self.work.boxes)
        factor = self.work.factor(box)
        image = cut(by_simplejpeg(sample["jpg"], factor), box, factor)
        return image.flip(-1) if random.random() < 0.5 else image


def webdataset_loader(work: Work) -> Batches:
    """WebDataset and its WebLoader with the fastest decoder and whole batches made in the workers."""
    import webdataset as wds

    tars = sorted(glob.glob(f"{work.folder}/shards/*.tar"))
    light = Work(**{**vars(work), "encoded": []})  # what the workers need
    data = (wds.WebDataset(tars, shardshuffle=len(tars), nodesplitter=None, empty_check=False).shuffle(100)
            .map(WebDatasetSample(light)).batched(work.batch, collation_fn=torch.stack))
    loader = wds.WebLoader(data, batch_size=None, num_workers=work.workers, persistent_workers=True,
                           multiprocessing_context=_context(), prefetch_factor=4)
    iter(loader)
    return lambda turn: iter(loader)


def spdl_loader(work: Work) -> Batches:
    """SPDL's pipeline of threads: FFmpeg decodes, cuts, resizes and flips; frames of a batch become one buffer."""
    import spdl.io as sio
    from spdl.pipeline import PipelineBuilder

    sio.demux_image(work.encoded[0])  # fails here where FFmpeg's libraries are missing
    options = {f: sio.decode_config(decoder_options={"lowres": str(f.bit_length() - 1), "threads": "1"})
               for f in (1, 2, 4, 8)}

    def decode(item: tuple[bytes, tuple[int, int, int, int]]):
        data, box = item
        factor = work.factor(box)
        top, left, height, width = (v // factor for v in box)
        flip = "hflip," if random.random() < 0.5 else ""
        return sio.decode_packets(
            sio.demux_image(data), decode_config=options[factor],
            filter_desc=f"crop={width}:{height}:{left}:{top}:exact=1,scale={SIZE}:{SIZE}:flags=bilinear,"
                        f"{flip}format=rgb24")

    def batches(turn: int) -> Iterator[torch.Tensor]:
        items = list(zip(work.encoded, work.boxes, strict=True))
        random.Random(turn).shuffle(items)
        pipeline = (PipelineBuilder().add_source(items).pipe(decode, concurrency=work.workers).aggregate(work.batch)
                    .pipe(lambda frames: sio.to_torch(sio.convert_frames(frames))).add_sink(4)
                    .build(num_threads=work.workers))
        with pipeline.auto_stop():
            yield from pipeline

    return batches


def dali_loader(work: Work) -> Batches:
    """DALI's CPU pipeline with its fused decoder that decodes only the rows of a random box."""
    from nvidia.dali import fn, pipeline_def, types

    arrays = [np.frombuffer(data, np.uint8) for data in work.encoded]

    def feed(info) -> np.ndarray:
        if info.iteration * work.batch + info.idx_in_batch >= len(arrays) // work.batch * work.batch:
            raise StopIteration
        return arrays[info.iteration * work.batch + info.idx_in_batch]

    @pipeline_def(batch_size=work.batch, num_threads=work.workers, device_id=None, prefetch_queue_depth=2)
    def graph():
        data = fn.external_source(feed, batch=False, dtype=types.UINT8)
        image = fn.decoders.image_random_crop(data, device="cpu", random_area=list(work.scale),
                                              random_aspect_ratio=list(work.ratio), use_fast_idct=True)
        image = fn.resize(image, size=[SIZE, SIZE], interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(image, horizontal=fn.random.coin_flip())

    pipeline = graph()
    pipeline.build()

    def batches(turn: int) -> Iterator[torch.Tensor]:
        for _ in range(len(arrays) // work.batch):
            yield torch.from_numpy(pipeline.run()[0].as_array())
        pipeline.reset()

    return batches
