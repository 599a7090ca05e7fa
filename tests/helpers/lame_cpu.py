"""A CPU that announces instructions which it does not have: bf16 kills the process, unless oneDNN is told otherwise.

As on the real thing, what counts is ONEDNN_MAX_CPU_ISA when the process first computes with oneDNN, fp32 included.
Processes become such a CPU by the variables that `variables` returns: their Python then imports the sitecustomize
module written here, which wraps torch's products as soon as torch is imported.
"""

from __future__ import annotations

import os
from pathlib import Path

_SITECUSTOMIZE = '''
import importlib.abc, importlib.machinery, os, signal, sys

WORKS = {works!r}
FIRST = []  # the variable when oneDNN was first used


def guard(function):
    import torch

    def guarded(*args, **kwargs):
        if not FIRST:
            FIRST.append(os.environ.get("ONEDNN_MAX_CPU_ISA"))
        half = torch.is_autocast_enabled("cpu") or any(getattr(a, "dtype", None) is torch.bfloat16 for a in args)
        if not half:
            return function(*args, **kwargs)
        if FIRST[0] not in WORKS:
            os.kill(os.getpid(), signal.SIGILL)
        with torch.autocast("cpu", enabled=False):  # whatever the real CPU can do
            return function(*(a.float() if isinstance(a, torch.Tensor) else a for a in args), **kwargs).bfloat16()

    return guarded


class Functional(importlib.abc.MetaPathFinder):
    """Finds torch.nn.functional as usual, and wraps what is in it once it is loaded."""

    def find_spec(self, name, path, target=None):
        if name != "torch.nn.functional":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            module.linear, module.conv2d = guard(module.linear), guard(module.conv2d)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Functional())
'''


def variables(folder: Path, *works: str) -> dict[str, str]:
    """For the environment of a process: its CPU can do bf16 only with one of these values of ONEDNN_MAX_CPU_ISA."""
    site = folder / "lame-cpu"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(_SITECUSTOMIZE.replace("{works!r}", repr(works)))
    root = Path(__file__).resolve().parents[2]
    paths = [str(site), str(root / "src"), str(root)]
    return {"PYTHONPATH": os.pathsep.join(paths), "XDG_CACHE_HOME": str(folder / "cache")}
