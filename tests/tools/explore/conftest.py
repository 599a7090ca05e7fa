"""Shared by the tests of explore: a server over the EN+SCL run whose decisions go when the test ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.exploring import desk_of, serving


@pytest.fixture
def served(trained):
    desk = desk_of(trained.scl)
    with serving(desk) as found:
        yield found
    Path(desk.decisions.path).unlink(missing_ok=True)
