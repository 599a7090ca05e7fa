"""Proves which files a device's decoder is given, that images come back as seen, and that one bad file does not change
how its neighbours are decoded. torchvision's decoder on the CPU stands in for the device's."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg

from lacuna.data_pipelines.decode import decode_image
from lacuna.data_pipelines.device_decoder import DeviceDecoder


def picture(kind: str = "JPEG", mode: str = "RGB", turn: int = 1, seed: int = 0, **options) -> bytes:
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = turn
    buffer = io.BytesIO()
    Image.fromarray(coarse).resize((61, 42)).convert(mode).save(buffer, kind, exif=exif, **options)
    return buffer.getvalue()


class Device:
    """Notes how many files came at a time; refuses a list with a damaged one, as nvJPEG does."""

    def __init__(self, refused: tuple[bytes, ...] = ()):
        self.calls: list[int] = []
        self.refused = refused

    def __call__(self, jpegs: list[torch.Tensor]) -> list[torch.Tensor]:
        self.calls.append(len(jpegs))
        if any(jpeg.numpy().tobytes() in self.refused for jpeg in jpegs):
            raise RuntimeError("nvjpegDecode failed")
        return [decode_jpeg(jpeg, ImageReadMode.RGB) for jpeg in jpegs]


def decoder(device: Device) -> DeviceDecoder:
    return DeviceDecoder(torch.device("cpu"), device)


@pytest.mark.parametrize("turn", range(1, 9))
def test_images_come_as_seen(turn):
    data = picture(turn=turn)
    (found,) = decoder(Device())([data])
    assert found is not None
    wanted = decode_image(data)
    assert found[1][:2] == tuple(wanted.shape[1:]) == tuple(found[0].shape[1:])
    assert (found[0].float() - wanted.float()).abs().mean() < 1


def test_what_it_cannot_read_is_left_to_the_host():
    whole = picture()
    members = [picture("PNG"), picture(mode="CMYK"), whole[:-40], b"", b"\xff\xd8\xff\xd9", picture("WEBP")]
    device = Device()
    assert decoder(device)(members) == [None] * 6
    assert device.calls == []
    grey, padded, progressive = decoder(device)([picture(mode="L"), whole + b"\0\0", picture(progressive=True)])
    assert device.calls == [3]
    assert all(image is not None and image[0].shape == (3, 42, 61) for image in (grey, padded, progressive))


def test_a_bad_file_is_alone_with_it():
    members = [picture(seed=seed) for seed in range(4)]
    device = Device(refused=(members[2],))
    found, alone = decoder(device)(members), [decoder(Device())([data])[0] for data in members]
    assert device.calls == [4, 1, 1, 1, 1]
    assert found[2] is None
    for place in (0, 1, 3):
        assert torch.equal(found[place][0], alone[place][0])


def test_a_full_device_is_not_a_bad_file():
    def full(jpegs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        DeviceDecoder(torch.device("cpu"), full)([picture()])
