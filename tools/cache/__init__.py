"""Fill, list and prune what phases with a cache read: activations of the fixed part of a classifier.

  lacuna cache my.yaml                    fill every view that its phases will read, on all cores or GPUs, with Ray
  lacuna cache my.yaml phases.0.cache.views=8 --address auto
  lacuna cache --list                     what there is in runs/.cache: samples, bytes, when it was last used
  lacuna cache my.yaml --list             the same where this config's runs keep it (train.cache_url)
  lacuna cache --prune 14                 remove what no run has used for 14 days (default 30; 0: everything)
Training fills a cache by itself, in the first epochs that see a view; filling ahead is for many machines, or before a
search. All runs with the same data, fixed weights, cut, image size, augmentation and precision share it.
"""

from __future__ import annotations

import argparse
import json

from lacuna.basics.errors import UserError
from lacuna.tools.cache.filling import fill
from lacuna.tools.cache.shelf import Kept, everything, prune
from lacuna.tools.passes.pool import add_pool_arguments, pool_settings
from lacuna.trainer.cache.views import cache_url
from lacuna.trainer.config.files import load_config

TAKES_OVERRIDES = True
_DAYS = 30.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", help="YAML file of the experiment, FILE:ROW of a table, or by name")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the config")
    parser.add_argument("--list", action="store_true", help="say what is there, and fill nothing")
    parser.add_argument("--prune", type=float, nargs="?", const=_DAYS, metavar="DAYS",
                        help=f"remove what was not used for so many days (default {_DAYS:g}), and fill nothing")
    parser.add_argument("--cache", metavar="URL", help="where to list or prune (default: the config's, or runs/.cache)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    add_pool_arguments(parser)


def run(args: argparse.Namespace) -> None:
    config = load_config(args.config, args.overrides) if args.config else None
    if args.list or args.prune is not None:
        if args.prune is not None and args.prune < 0:
            raise UserError(f"--prune {args.prune:g}: give a number of days, 0 or more.")
        url = args.cache or (cache_url(config) if config else "runs/.cache")
        found = everything(url) if args.prune is None else prune(url, args.prune)
        _show(found, url, args.json, "" if args.prune is None else "removed ")
        return
    if config is None:
        raise UserError("give a config whose caches are to be filled (`lacuna configs` lists those that ship), or "
                        "--list, or --prune.")
    if args.cache:
        raise UserError("--cache names what to list or prune. To fill another place, give train.cache_url=URL.")
    facts = fill(config, pool_settings(args))
    if args.json:
        print(json.dumps({"cache": cache_url(config), "views": facts}))
        return
    for fact in facts:
        print(f"{fact['address']}: phase {fact['phase']!r}, {fact['cut']}, {fact['view']} of {fact['data']}: "
              f"{fact['samples']:,} samples, {fact['bytes'] / 1e6:,.1f} MB")


def _show(found: list[Kept], url: str, as_json: bool, verb: str) -> None:
    if as_json:
        print(json.dumps({"cache": url, "views": [kept.facts() for kept in found]}))
        return
    for kept in found:
        print(f"{verb}{kept}")
    print(f"{url}: {verb}{len(found)} views, {sum(kept.bytes for kept in found) / 1e6:,.1f} MB")
