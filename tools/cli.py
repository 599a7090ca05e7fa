"""The `lacuna` command: finds the subcommand's module, and turns user errors into one line and exit code 2."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from types import ModuleType

import lacuna
from lacuna.basics.errors import UserError
from lacuna.basics.refusals import refusal

# command → (module in this folder, one line). A module has `configure(parser)` and `run(args) -> int | None`.
COMMANDS = {
    "doctor": ("doctor", "examine this machine: what is ready for training, what is not, and what to do"),
    "demo": ("demo", "train on handwritten digits with one label per image, on 2 ranks, and show the result"),
    "train": ("train", "train a classifier: a config, changes to it, one rank or many"),
    "weights": ("weights", "what a backbone can start from; convert weights of other libraries"),
    "configs": ("configs", "list the experiments that ship and the numbers to reach; print one resolved"),
    "tune": ("tune", "search settings, or compare methods, on validation images: a space, a budget, best.yaml"),
    "table": ("table", "train the rows of a table with several seeds and print ours beside the reported numbers"),
    "shards": ("shards", "make, index and check WebDataset shards"),
    "annotate": ("annotate", "simulate partial annotation as a new label sidecar over the same shards"),
    "eval": ("eval", "evaluate a checkpoint on shards with Ray, or a file of any model's predictions"),
    "prior": ("prior", "class priors of a dataset under a trained model, for CSL's selective loss"),
    "csl": ("csl", "CSL's two stages in one command: train Ignore, estimate the class prior, train Selective"),
    "neighbors": ("neighbors", "nearest neighbours and class distances, for Soft Exposure"),
    "inspect": ("inspect_state", "look into the per-sample state: schema, sizes, histograms, one sample's row"),
    "state": ("state", "list, verify, export, reshard and migrate the per-sample state of a run"),
    "report": ("report", "one HTML file about runs: curves, classes, beliefs about labels, heatmaps"),
    "explore": ("explore", "a local web app: browse images by belief, accept or reject suggested labels"),
    "exchange": ("exchange", "labels, decisions and suggestions to and from COCO, Label Studio, FiftyOne, VOC, …"),
    "heatmaps": ("heatmaps", "draw the running heatmaps of training images"),
    "export": ("export", "make a model folder from a checkpoint: safetensors, labels.json, ONNX"),
    "predict": ("predict", "what an exported model says about images, with a picture of heatmaps"),
    "suggest": ("suggest", "the missing labels that a model is most sure of, at a chosen precision"),
    "select": ("select", "which labels to ask a person for next, for a budget of questions"),
    "audit": ("audit", "likely wrong labels, leaks between splits, outliers and confused classes of a dataset"),
    "import-scores": ("import_scores", "read tables of scores made elsewhere (CLIP, another run) into a store"),
    "scores": ("scores", "a table of scores by any model: CLIP and its kin, timm, torchvision, one of our runs"),
    "relation": ("relation", "how much classes have to do with each other, for SCPNet: labels, beliefs, names, a tree"),
    "refit": ("refit", "train the head of a finished run again, class by class, on known labels alone"),
    "methods": ("methods", "list the methods: paper, per-sample state, needs, settings and defaults"),
    "cache": ("cache", "fill, list and prune what phases with a cache read: activations of fixed layers"),
    "plan": ("plan", "say what a run will need (disk, memory, I/O, time) and what will not fit"),
    "drill": ("drill", "rehearse kills, freezes, full disks and damage on this machine before a long run"),
    "bench": ("bench", "measure speed and quality; the last line is one JSON object"),
}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0 if argv else 2
    if argv[0] == "--version":
        print(f"lacuna {lacuna.__version__}")
        return 0
    if argv[0] not in COMMANDS:
        close = difflib.get_close_matches(argv[0], COMMANDS, 1)
        hint = f"did you mean `lacuna {close[0]}`?" if close else f"there are: {', '.join(COMMANDS)}."
        print(f"lacuna: no command {argv[0]!r}; {hint} See `lacuna --help`.", file=sys.stderr)
        return 2
    module, args = parse(argv)
    try:
        return int(module.run(args) or 0)
    except UserError as error:
        print(f"lacuna {argv[0]}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `lacuna … | head`: nobody reads the rest
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        refused = refusal(error)
        if refused is None:
            raise
        print(f"lacuna {argv[0]}: {refused}. Then run it again.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def parse(argv: list[str]) -> tuple[ModuleType, argparse.Namespace]:
    """The command's module, and its arguments."""
    module, parser = open_command(argv[0])
    # Commands that take config overrides let them stand among the options.
    mixed = getattr(module, "TAKES_OVERRIDES", False)
    return module, (parser.parse_intermixed_args if mixed else parser.parse_args)(argv[1:])


def open_command(name: str) -> tuple[ModuleType, argparse.ArgumentParser]:
    module = importlib.import_module(f"lacuna.tools.{COMMANDS[name][0]}")
    parser = argparse.ArgumentParser(
        prog=f"lacuna {name}", description=COMMANDS[name][1] + ".",
        epilog=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.configure(parser)
    lines = (module.__doc__ or "").splitlines()
    for leaf in leaves(parser):
        if leaf is not parser:
            _show_examples(leaf, [line for line in lines if line.startswith(f"  {leaf.prog} ")])
    return module, parser


def leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """The parser itself, or those of its actions, which may have actions of their own."""
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return [leaf for action in inner for sub in action.choices.values() for leaf in leaves(sub)] or [parser]


def _show_examples(leaf: argparse.ArgumentParser, lines: list[str]) -> None:
    """Of a command's examples, those of one action: who asks for its help looks there."""
    if lines and f"  {leaf.prog} " not in (leaf.epilog or ""):
        leaf.epilog = "\n\n".join(filter(None, [(leaf.epilog or "").strip(), "\n".join(["Examples:", *lines])]))
        leaf.formatter_class = argparse.RawDescriptionHelpFormatter


def _overview() -> str:
    lines = ["lacuna: train multi-label image classifiers when most labels are missing", ""]
    lines += [f"  lacuna {name:<13} {text}" for name, (_, text) in COMMANDS.items()]
    lines += ["", "Under DeepSpeed's own launcher: deepspeed trainer/run.py --config CONFIG [section.key=value …]",
              "Help for one command, with examples: lacuna COMMAND --help",
              "Exit codes: 0 done, 1 done but something is wrong with what was looked at, 2 a mistake in the command, "
              "130 interrupted"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
