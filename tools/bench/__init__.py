"""Benchmarks: each compares with a named alternative on this machine, within one run.

  lacuna bench map             exact mAP against scikit-learn, full size
  lacuna bench map --quick     the same in under 50 s
  lacuna bench map --help      what one benchmark measures, and its options
The last line printed is one JSON object: {"bench": NAME, "ratios": {…}, …}.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re

from lacuna.basics.errors import UserError

# name → module. A module has `run(quick, args) -> dict` (with the key "ratios") and may have `configure(parser)`.
BENCHES = {
    "cache": "lacuna.tools.bench.cache",
    "decode": "lacuna.tools.bench.decode",
    "device": "lacuna.tools.bench.device",
    "loop": "lacuna.tools.bench.loop",
    "loss": "lacuna.tools.bench.loss",
    "map": "lacuna.tools.bench.map",
    "memory": "lacuna.tools.bench.memory",
    "quality": "lacuna.tools.bench.quality",
    "remote": "lacuna.tools.bench.remote",
    "scale": "lacuna.tools.bench.scale",
    "start": "lacuna.tools.bench.start",
    "state": "lacuna.tools.bench.state",
    "tax": "lacuna.tools.bench.tax",
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help=f"which benchmark: {', '.join(BENCHES)}")
    parser.epilog = "\n".join(["Benchmarks:", *(f"  {name:<9} {_first_sentence(name)}" for name in BENCHES), "",
                               str(__doc__)])
    parser.add_argument("options", nargs=argparse.REMAINDER, help="--quick and the benchmark's own options")


def _first_sentence(name: str) -> str:
    """Of what a benchmark's module says about itself, read without importing it: help is quick."""
    found = importlib.util.find_spec(BENCHES[name])
    with open(str(found and found.origin), encoding="utf-8") as f:
        text = ast.get_docstring(ast.parse(f.read())) or ""
    return re.split(r"(?<=\.)\s|\n\n", " ".join(text.split("\n\n")[0].split()))[0]


def run(args: argparse.Namespace) -> None:
    if args.name not in BENCHES:
        raise UserError(f"no benchmark {args.name!r}; there are: {', '.join(BENCHES)}. Try `lacuna bench map --quick`.")
    module = importlib.import_module(BENCHES[args.name])
    parser = argparse.ArgumentParser(prog=f"lacuna bench {args.name}", description=module.__doc__,
                                     epilog=f"Example:\n  lacuna bench {args.name} --quick",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller form, at most 50 s on 2 cores")
    if hasattr(module, "configure"):
        module.configure(parser)
    own = parser.parse_args(args.options)
    report = module.run(own.quick, own)
    print(json.dumps({"bench": args.name, "quick": own.quick, **report}))
