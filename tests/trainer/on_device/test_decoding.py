"""`data.decode=device` is chosen where it can be had and said where not, is part of a run's identity, and changes
nothing of a batch but some levels of its pixels (seen on the pretended device)."""

from __future__ import annotations

import io
import logging
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from lacuna.data_pipelines.device_decoder import DeviceDecoder
from lacuna.data_pipelines.packing import Layout, pack
from lacuna.data_pipelines.readers import digits
from lacuna.data_pipelines.readers.base import Sample
from lacuna.trainer.config.data_section import DataConfig
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.on_device import decoding
from tests.helpers import launching
from tests.helpers.cached_runs import body
from tests.helpers.damaged_shards import blank_out


def data(decode: str) -> DataConfig:
    return DataConfig.model_validate({"train": {"url": "x"}, "decode": decode})


@pytest.mark.parametrize(("device", "reason"), [("cpu", "the run is not on a GPU"), ("cuda", "it cannot be had here")])
def test_where_it_cannot_be_had_the_cpu_decodes(caplog, device, reason):
    decoding._tried.cache_clear()
    with caplog.at_level(logging.INFO, "lacuna"):
        found = [decoding.device_decoder(data("device"), torch.device(device)) for _ in range(2)]
    if device == "cuda" and torch.cuda.is_available():
        assert isinstance(found[0], DeviceDecoder)
        return
    assert found == [None, None]
    (line,) = caplog.messages
    assert line.startswith(f"data.decode=device: {reason}")
    assert line.endswith("images are decoded on the CPU")


def test_the_cpu_is_not_left_unasked(caplog):
    with caplog.at_level(logging.INFO, "lacuna"):
        assert decoding.device_decoder(data("cpu"), torch.device("cuda")) is None
    assert not caplog.messages


def test_identity(tmp_path):
    plain = body(tmp_path, tmp_path, "run", None)
    found = [parse_config({**plain, "data": {**plain["data"], "decode": where}}, "test") for where in ("cpu", "device")]
    assert found[0].fingerprint() == parse_config(plain, "test").fingerprint() != found[1].fingerprint()
    assert found[0].differences(found[1]) == ["data.decode: None → 'device'"]


@dataclass(frozen=True)
class Png:
    scene: digits.Scene

    def read(self) -> bytes:
        buffer = io.BytesIO()
        Image.open(io.BytesIO(self.scene.read())).save(buffer, "PNG")
        return buffer.getvalue()


def mixed_pictures(folder: Path) -> int:
    """`folder`/shards: 60 pictures, every fifth a PNG, one damaged; how many JPEGs are whole."""
    dataset = digits.read(60)
    samples = [Sample(sample.key, Png(sample.source), "png") if i % 5 == 0 else sample
               for i, sample in enumerate(dataset.samples)]
    index = pack(replace(dataset, samples=samples), str(folder / "shards"), Layout(streams=1, rows_per_shard=15),
                 workers=1)
    blank_out(index, 1, index.members(1).extensions.index("jpg"))
    return 60 - 12 - 1


def test_batches_differ_by_a_few_levels_only(tmp_path):
    """JPEGs go to the device, PNGs and a damaged file to the host. Two views, each with a crop of its own."""
    path = tmp_path / "decoding.py"
    path.write_text("""
import sys
import torch
from torchvision.io import ImageReadMode, decode_jpeg
from lacuna.data_pipelines.augment import Augment
from lacuna.data_pipelines.device_decoder import DeviceDecoder
from lacuna.data_pipelines.plan import EpochPlan
from lacuna.data_pipelines.source import ShardSource
from lacuna.data_pipelines.sample_maker import SampleMaker
from lacuna.data_pipelines.stream import EpochStream
from tests.helpers import pretended_device as pretended
source = ShardSource.load(sys.argv[1], "labels", None)
device, given = pretended.register(), []

def decode(jpegs):
    given.append(len(jpegs))
    return [decode_jpeg(jpeg, ImageReadMode.RGB).to(device, non_blocking=True) for jpeg in jpegs]

def batches(decoder):
    augment = Augment(24, crop="random_resized", flip=True, cutout=0.3)
    maker = SampleMaker(augment, 1, 0, strong=Augment(24, crop="random_resized", randaugment=1), decoder=decoder)
    return list(EpochStream(source, EpochPlan(source.counts, 0, 0, 1, 20, 2), range(1), maker))

levels = 0
for host, other in zip(batches(None), batches(DeviceDecoder(device, decode)), strict=True):
    assert [bad.key for bad in host.bad] == [bad.key for bad in other.bad]
    assert (host.rows == other.rows).all() and torch.equal(host.boxes, other.boxes)
    assert torch.equal(host.flips, other.flips) and torch.equal(host.labels, other.labels)
    for one, two in ((host.inputs, other.inputs), (host.strong, other.strong)):
        difference = (one.float() - two.float()).abs()
        # RandAugment may turn one level into many (posterize, equalize).
        assert difference.mean() < (1 if one is host.inputs else 4), difference.mean()
        levels += difference.sum()
assert sum(given) == int(sys.argv[2]) and max(given) == 8, given
assert levels > 0
""")
    jpegs = mixed_pictures(tmp_path)
    launch = launching.launches.Launch(launching.command(1, str(tmp_path / "shards"), str(jpegs), script=str(path)),
                                       str(tmp_path / "out"), launching.environment(), str(tmp_path))
    assert launch.wait(600) == 0, launch.text()[-3000:]
