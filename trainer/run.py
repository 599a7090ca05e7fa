"""Entry point: `deepspeed trainer/run.py --config FILE section.key=value …`, or plain python for one process."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Launching a file puts its folder first on sys.path, where our module names would shadow others'. What belongs
    # there is the folder that holds the package: `src` of a clone, or wherever the package is installed.
    _above = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    _clone = os.path.join(_above, "src")
    sys.path[0] = _clone if os.path.isdir(os.path.join(_clone, "lacuna")) else os.path.dirname(_above)

import argparse
import time
import traceback

from lacuna.basics.errors import UserError
from lacuna.basics.refusals import refusal
from lacuna.trainer.config.files import load_config
from lacuna.trainer.config.sections import Config

_WORD_SECONDS = 2.5  # in which a launcher has noticed that a rank left (it looks once a second)
EPILOG = """examples:
  deepspeed --num_gpus 8 trainer/run.py --config configs/cole.yaml:coco14_an_linear
  python trainer/run.py --config configs/demo.yaml phases.0.lr=1e-3 train.precision=bf16
A run that was killed is resumed by the same command."""


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    try:
        return run(load_config(args.config, args.overrides))
    except UserError as error:
        _let_others_speak_first()
        print(f"lacuna: {error}", file=sys.stderr, flush=True)
        return 2
    except Exception as error:
        # The launcher ends the peers as soon as this process is gone: say why first.
        rank = os.environ.get("RANK", "0")
        refused = refusal(error)
        if refused:
            _let_others_speak_first()
            print(f"lacuna: rank {rank}: {refused}. Then give the same command again: it goes on from the last whole "
                  "checkpoint, or from the beginning if there is none yet.", file=sys.stderr, flush=True)
            return 2
        from lacuna.trainer.peers import wait_for_news
        from lacuna.trainer.world import HUNG_EXIT_CODE, PeersMissing, lost_peer

        spoken = wait_for_news(seconds=2)
        lost = lost_peer(error)
        if lost and spoken:
            time.sleep(_WORD_SECONDS)
        text = f" {lost}" if lost else f"\n{traceback.format_exc()}"
        print(f"rank {rank} failed:{text}", file=sys.stderr, flush=True)
        return HUNG_EXIT_CODE if isinstance(error, PeersMissing) else 1


def _let_others_speak_first() -> None:
    """What all ranks find is said once: a launcher ends the others when the first one leaves.

    Rank 0 comes first, then the first one of every node; what only this rank found is said, too, a moment later.
    """
    first, first_here = (os.environ.get(name, "0") == "0" for name in ("RANK", "LOCAL_RANK"))
    if not first:
        time.sleep(_WORD_SECONDS if first_here else 2 * _WORD_SECONDS)


def run(config: Config) -> int:
    # Imports that cost seconds wait until the config is known to be good.
    from lacuna.trainer import launch, world
    from lacuna.trainer.orphans import LauncherWatch

    watch = LauncherWatch()
    launch.train(config, hung=world.end_process)
    watch.stop()
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a multi-label classifier from partial labels.", epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True,
                        help="YAML file of the experiment, FILE:ROW of a table, or either by name (`lacuna configs`)")
    parser.add_argument("--local_rank", type=int, help="set by the deepspeed launcher")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="changes to the config")
    return parser.parse_intermixed_args(argv)


if __name__ == "__main__":
    code = main()
    # Threads of libraries (Ray, TensorBoard, gloo) must not keep a failed rank alive while its peers wait.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
