"""Train: the same as `deepspeed trainer/run.py --config CONFIG …`, from a clone or an installed package.

  lacuna train own_images data.train.url=shards/mine             one that ships, by its name (`lacuna configs`)
  lacuna train cole:coco14_an_linear phases.0.lr=1e-4 --ranks 8  one row of a table
  lacuna train my.yaml --hostfile hosts                          a file of yours, on several nodes
One rank is a plain process; several of one machine are started beside each other, those of a hostfile by DeepSpeed's
launcher. The exit code is the training's own: 0 done or stopped as asked, 2 a mistake in the config. A run that was
killed or stopped is resumed by the same command.
"""

from __future__ import annotations

import argparse
import os
import sys

from lacuna.basics.errors import UserError
from lacuna.tools.launches import command, gpus
from lacuna.trainer.config.files import load_config

TAKES_OVERRIDES = True


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", help="YAML file, FILE:ROW of a table, or the name of what ships")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the config")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--ranks", type=int, metavar="N", help="of this machine (default: one per GPU, else 1)")
    where.add_argument("--hostfile", metavar="FILE", help="DeepSpeed hostfile: all slots of several nodes instead")
    parser.add_argument("--verbose", action="store_true", help="by DeepSpeed's launcher, and with all that it says")


def run(args: argparse.Namespace) -> None:
    if args.ranks is not None and args.ranks < 1:
        raise UserError(f"--ranks {args.ranks}: must be 1 or more.")
    if args.hostfile and not os.path.isfile(args.hostfile):
        raise UserError(f"--hostfile {args.hostfile}: no such file; write one line `host slots=N` per node.")
    load_config(args.config, args.overrides)  # a mistake in it is said once, not by every rank
    ranks = 1 if args.hostfile else args.ranks or gpus() or 1
    words = command(ranks, "--config", args.config, *args.overrides, hostfile=args.hostfile, verbose=args.verbose)
    sys.stdout.flush()
    sys.stderr.flush()
    # In place of this process: signals then reach the training, and its exit code is ours.
    os.execv(words[0], words)
