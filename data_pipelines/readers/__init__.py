"""Readers of public datasets: `READERS[name].read(**options)` gives a Dataset. One file a family, one line here."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from data_pipelines.readers import (
    cifar100,
    coco,
    cub,
    digits,
    features,
    folder,
    imagenet,
    lvis,
    nuswide,
    openimages,
    tsv,
    voc,
)
from data_pipelines.readers.base import Dataset, Sample

__all__ = ["READERS", "Dataset", "Reader", "Sample"]


@dataclass(frozen=True)
class Reader:
    """`configure` adds the command-line options whose names are the keyword arguments of `read`."""

    summary: str
    configure: Callable[[argparse._ArgumentGroup], None]
    read: Callable[..., Dataset]


READERS = {
    "folder": Reader("an image folder, one subfolder a class", folder.configure, folder.read),
    "imagenet": Reader("ImageNet-1K: train folders, or val with a ground-truth file or ReaL labels",
                       imagenet.configure, imagenet.read),
    "coco": Reader("COCO instances (2014, 2017)", coco.configure_instances, coco.read_instances),
    "coco_panoptic": Reader("COCO panoptic (things and stuff)", coco.configure_panoptic, coco.read_panoptic),
    "voc": Reader("PASCAL VOC (ImageSets/Main)", voc.configure, voc.read),
    "lvis": Reader("LVIS: federated labels with verified negatives", lvis.configure, lvis.read),
    "nuswide": Reader("NUS-WIDE: official lists, or the .npy matrices of Cole et al.", nuswide.configure, nuswide.read),
    "cub": Reader("CUB-200-2011 with its 312 attributes as classes", cub.configure, cub.read),
    "cifar100": Reader("CIFAR-100: python or binary archive", cifar100.configure, cifar100.read),
    "openimages": Reader("OpenImages V6 image-level label CSVs", openimages.configure, openimages.read),
    "digits": Reader("scenes of handwritten digits (scikit-learn's): a small set for a first try, no download",
                     digits.configure, digits.read),
    "tsv": Reader("a text table of path, positive classes, negative classes", tsv.configure, tsv.read),
    "features": Reader("pre-extracted feature vectors (.npy) with labels", features.configure, features.read),
}
