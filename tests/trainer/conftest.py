"""One uninterrupted EN+SCL run on 2 ranks and local disk: what runs on other storage, nodes and ranks must equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launching import Launch
from tests.helpers.run_configs import en_scl_config


@pytest.fixture(scope="session")
def en_scl_reference(single_shards, tmp_path_factory) -> Path:
    launch = Launch(en_scl_config(single_shards, "reference"), tmp_path_factory.mktemp("en-scl"), 2)
    launch.ok()
    return launch.folder
