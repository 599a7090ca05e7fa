"""All metadata is in setup.cfg. This file only refuses to build a package without contents."""

import os

from setuptools import setup

ROOMS = ("trainer", "state_store", "data_pipelines", "tools", "configs")

for _room in ROOMS:
    if not os.path.isdir(os.path.join("src", "lacuna", _room)):
        raise SystemExit(
            f"src/lacuna/{_room} is not a folder: the links in src/lacuna were not checked out as links "
            "(git config core.symlinks is false, or an archive lost them). Clone again with "
            "`git clone -c core.symlinks=true`, or build on a system that has symbolic links."
        )

setup()
