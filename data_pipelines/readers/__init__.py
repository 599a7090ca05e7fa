"""Readers of public datasets: `READERS[name].read(**options)` gives a Dataset. One file a family, one line here."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from lacuna.data_pipelines.readers import (
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
from lacuna.data_pipelines.readers.base import Dataset, Sample

__all__ = ["READERS", "Dataset", "Reader", "Sample"]


@dataclass(frozen=True)
class Reader:
    """`configure` adds the command-line options whose names are the keyword arguments of `read`."""

    summary: str
    configure: Callable[[argparse._ArgumentGroup], None]
    read: Callable[..., Dataset]
    example: str  # options that can be copied


READERS = {
    "folder": Reader("an image folder, one subfolder a class", folder.configure, folder.read,
                     "--images photos --out shards/own"),
    "imagenet": Reader("ImageNet-1K: train folders, or val with a ground-truth file or ReaL labels",
                       imagenet.configure, imagenet.read,
                       "--images imagenet/val --split val --real real.json --out shards/imagenet/real"),
    "coco": Reader("COCO instances (2014, 2017)", coco.configure_instances, coco.read_instances,
                   "--annotations annotations/instances_val2014.json --images val2014 --split val --no-shuffle "
                   "--out shards/coco14/test"),
    "coco_panoptic": Reader("COCO panoptic (things and stuff)", coco.configure_panoptic, coco.read_panoptic,
                            "--annotations panoptic_train2017.json --images train2017 --out shards/coco17/train"),
    "voc": Reader("PASCAL VOC (ImageSets/Main)", voc.configure, voc.read,
                  "--root VOCdevkit/VOC2012 --split train --out shards/voc12/train"),
    "lvis": Reader("LVIS: federated labels with verified negatives", lvis.configure, lvis.read,
                   "--annotations lvis_v1_train.json --images coco --out shards/lvis/train"),
    "nuswide": Reader("NUS-WIDE: official lists, or the .npy matrices of Cole et al.", nuswide.configure, nuswide.read,
                      "--root NUS-WIDE --images NUS-WIDE/Flickr --split Train --out shards/nus/train"),
    "cub": Reader("CUB-200-2011 with its 312 attributes as classes", cub.configure, cub.read,
                  "--root CUB_200_2011 --split train --out shards/cub/train"),
    "cifar100": Reader("CIFAR-100: python or binary archive", cifar100.configure, cifar100.read,
                       "--archive cifar-100-python.tar.gz --unlisted negative --out shards/cifar100/train"),
    "openimages": Reader("OpenImages V6 image-level label CSVs", openimages.configure, openimages.read,
                         "--labels oidv6-train-annotations-human-imagelabels.csv "
                         "--classes oidv6-class-descriptions.csv --images train --out shards/openimages_v6/train"),
    "digits": Reader("scenes of handwritten digits (scikit-learn's): a small set for a first try, no download",
                     digits.configure, digits.read, "--count 4000 --out shards/digits/train"),
    "tsv": Reader("a text table of path, positive classes, negative classes", tsv.configure, tsv.read,
                  "--table labels.tsv --classes classes.txt --images photos --unlisted negative --out shards/val"),
    "features": Reader("pre-extracted feature vectors (.npy) with labels", features.configure, features.read,
                       "--features train.npy --labels train_labels.tsv --classes classes.txt --out shards/features"),
}
