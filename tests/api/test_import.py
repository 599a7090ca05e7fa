"""Proves that importing lacuna costs nothing until a name is used, and that every public name is there, documented."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import lacuna
from tests.helpers.launching import environment

_BARE = """
import sys
import lacuna
heavy = {"torch", "numpy", "ray", "zarr", "pandas", "yaml", "pydantic", "webdataset", "fsspec"} & set(sys.modules)
ours = [name for name in sys.modules if name.startswith("lacuna.")]
print(sorted(heavy), ours, lacuna.__version__)
"""


def child(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_bare_import_loads_nothing_else():
    assert child(_BARE) == f"[] [] {lacuna.__version__}"


def test_a_config_needs_neither_torch_nor_zarr():
    code = "import sys, lacuna; lacuna.load_config; lacuna.UserError; print({'torch', 'zarr'} & set(sys.modules))"
    assert child(code) == "set()"


def test_every_public_name_is_there_and_documented():
    for name in lacuna.__all__:
        found = getattr(lacuna, name)
        if name != "__version__":
            assert inspect.getdoc(found), name
    assert dir(lacuna) == lacuna.__all__
    assert set(lacuna._ROOMS) | {"__version__"} == set(lacuna.__all__)


def test_functions_show_an_example():
    for name in lacuna.__all__:
        found = getattr(lacuna, name)
        if inspect.isfunction(found):
            assert f"lacuna.{name}(" in (found.__doc__ or ""), name


def test_another_name_is_refused_with_those_that_exist():
    with pytest.raises(AttributeError, match=r"'trian'.* train"):
        lacuna.trian  # noqa: B018
