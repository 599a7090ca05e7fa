"""Proves that the page about a search has the best trial of all in its headline, beside those of the other methods."""

from __future__ import annotations

import pytest

from lacuna.basics.errors import UserError
from lacuna.tools.report.headline import _subject
from lacuna.tools.report.searches import best_runs

SCORES = {"an-0000": 89.1, "role-0007": 87.1, "en-0003": 80.0}


@pytest.mark.parametrize("methods", [("an",), ("an", "role"), ("role", "an", "en"), ("en", "role", "an")])
def test_the_headline_is_about_the_best(methods):
    best_of = {method: next(name for name in SCORES if name.startswith(method)) for method in methods}
    found = {"best": "an-0000", "best_of_methods": best_of,
             "trials": [{"trial": name, "folder": f"trials/{name}"} for name in SCORES]}
    folders = best_runs("tune", found)
    assert sorted(folders) == sorted(f"trials/{name}" for name in best_of.values())
    runs = [{"scores": {"val": SCORES[folder.removeprefix("trials/")]}} for folder in folders]
    assert folders[_subject(runs, {None, 0})] == "trials/an-0000"


def test_without_a_score_there_is_nothing_to_show():
    with pytest.raises(UserError, match="no trial of this search has a score yet"):
        best_runs("tune", {"best": None, "best_of_methods": {}, "trials": []})
