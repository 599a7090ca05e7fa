"""Datasets that a trained model is asked about: named by arguments, and checked to have the model's class list."""

from __future__ import annotations

import argparse

from lacuna.basics.errors import UserError
from lacuna.data_pipelines.source import ShardSource
from lacuna.tools.passes.trained import Trained, check_classes


def open_dataset(trained: Trained, url: str, labels: str, subset: str | None) -> ShardSource:
    source = ShardSource.load(url, labels, subset, trained.config.data.scratch)
    check_classes(trained, source.index)
    if not source.counts.sum():
        raise UserError(f"{url}: no samples take part. Check it{f' and the subset {subset!r}' if subset else ''}.")
    return source


def training_set(trained: Trained, url: str | None = None, labels: str | None = None,
                 subset: str | None = None) -> ShardSource:
    """The run's own, as it was trained on where nothing else is said; or the one at `url`."""
    if url:
        return open_dataset(trained, url, labels or "labels", subset)
    own = trained.config.data.train
    return open_dataset(trained, own.url, labels or own.labels, subset or own.subset)


def add_val_arguments(parser: argparse.ArgumentParser, use: str) -> None:
    parser.add_argument("--val", metavar="URL", help=use)
    parser.add_argument("--val-sidecar", default="labels", metavar="NAME", help="their label sidecar (default: labels)")
    parser.add_argument("--val-subset", metavar="NAME", help="only these rows of them (default: all)")


def val_set(trained: Trained, args: argparse.Namespace) -> ShardSource | None:
    """What --val names."""
    return open_dataset(trained, args.val, args.val_sidecar, args.val_subset) if args.val else None
