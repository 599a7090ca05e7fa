"""Lacuna trains multi-label image classifiers when most labels are missing.

    import lacuna

    config = lacuna.load_config("demo", "train.log_every=10")
    results = lacuna.train(config)
    print(results.test["map"], results.run.metrics[-1])

The names in `__all__` are the public API (docs/api.md); everything else is private and may move. Importing this package
imports nothing else: a name brings what it needs, torch for one, when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lacuna.api.data import dataset, stream
    from lacuna.api.errors import UserError
    from lacuna.api.measuring import average_precision
    from lacuna.api.runs import RunReader, open_run
    from lacuna.api.settings import Config, load_config, methods
    from lacuna.api.state import StateReader, open_state
    from lacuna.api.training import Results, train

__version__ = "0.2.0"
__all__ = ["Config", "Results", "RunReader", "StateReader", "UserError", "__version__", "average_precision", "dataset",
           "load_config", "methods", "open_run", "open_state", "stream", "train"]

_ROOMS = {"Config": "settings", "Results": "training", "RunReader": "runs", "StateReader": "state",
          "UserError": "errors", "average_precision": "measuring", "dataset": "data", "load_config": "settings",
          "methods": "settings", "open_run": "runs", "open_state": "state", "stream": "data", "train": "training"}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'lacuna' has no attribute {name!r}; it has {', '.join(__all__)}")
    found = getattr(import_module(f"lacuna.api.{_ROOMS[name]}"), name)
    globals()[name] = found  # asked for once
    return found


def __dir__() -> list[str]:
    return __all__
