"""Proves that rungs, survivors and draws are what a naive reading of successive halving says, whoever reports first."""

from __future__ import annotations

import itertools
import random

import pytest

from lacuna.basics.errors import UserError
from lacuna.tools.trials.job import Outcome
from lacuna.tools.tune.budget import Tune, contenders
from lacuna.tools.tune.findings import mattered
from lacuna.tools.tune.halving import Bracket, evaluated_at, rung_epochs, rung_parts
from lacuna.trainer.config.sections import parse_config
from lacuna.trainer.config.spaces import Dimension, grid, parse_space

BODY = {"name": "x", "data": {"train": {"url": "/t"}, "val": {"url": "/v"}},
        "phases": [{"name": name, "epochs": epochs, "batch": 8, "lr": 0.1} for name, epochs in (("a", 4), ("b", 5))]}


def naive(scores: dict[int, float | None], counts: list[int]) -> list[list[int]]:
    """Who is alive at every rung."""
    alive, found = sorted(scores), []
    for count in counts:
        found.append(sorted(alive))
        able = [t for t in alive if scores[t] is not None]
        alive = sorted(able, key=lambda t: (-scores[t], t))[:count]
    return found


def test_survivors_do_not_depend_on_who_reports_first():
    rng = random.Random(1)
    for factor, trials in itertools.product((2, 3), (1, 2, 7, 9, 20)):
        parts = rung_parts(trials, 27, 1, factor)
        scores = {t: rng.choice([None, round(rng.random(), 1)]) for t in range(trials)}
        scores[rng.randrange(trials)] = 0.5
        counts, left = [], trials
        for _ in parts:
            left = max(1, left // factor)
            counts.append(left)
        expected = naive(scores, counts)
        bracket, seen = Bracket(parts, factor, list(range(trials))), []
        while not bracket.over:
            seen.append(bracket.alive)
            order = list(bracket.alive)
            rng.shuffle(order)
            for i, trial in enumerate(order):
                score = scores[trial]
                outcome = Outcome("failed") if score is None else Outcome("paused", score)
                answer = bracket.report(trial, outcome)
                assert (answer is None) == (i + 1 < len(order))
        assert seen == [alive for alive in expected if alive]


def test_rungs():
    assert rung_parts(27, 27, 1, 3) == [27, 9, 3, 1]
    assert rung_parts(27, 10, 1, 3) == [9, 3, 1]
    assert rung_parts(27, 10, 2, 3) == [3, 1]
    assert rung_parts(4, 100, 1, 3) == [3, 1]
    assert rung_parts(100, 100, 1, 1) == [1]
    config = parse_config(BODY, "test")
    assert evaluated_at(config) == list(range(1, 10))
    assert [rung_epochs(config, part, 1) for part in (9, 3, 1)] == [1, 3, 0]
    assert rung_epochs(config, 9, 2) == 2
    seldom = parse_config({**BODY, "train": {"eval_every": 3}}, "test")
    assert evaluated_at(seldom) == [3, 4, 7, 9]
    assert [rung_epochs(seldom, part, 1) for part in (9, 2, 1)] == [3, 7, 0]


def test_draws_fill_the_space_and_are_shared():
    space = {"phases.0.lr": {"log": ["1e-4", "1e-1"]}, "phases.0.batch": [8, 16], "phases.0.epochs": {"whole": [2, 4]}}
    tune = Tune(space=space, methods={"an": {}, "role": {"method.lr": {"range": [0.1, 0.2]}}})
    an, role = contenders(BODY, tune, ["an", "role"], "t")
    assert an.settings(0) == {}
    drawn = [an.settings(i) for i in range(1, 33)]
    for i, settings in enumerate(drawn):
        assert settings.items() <= role.settings(i + 1).items()
        assert role.body_of(i + 1)["method"]["name"] == "role"
    decades = [sum(1e-4 * 10**d <= s["phases.0.lr"] < 1e-3 * 10**d for s in drawn) for d in range(3)]
    assert min(decades) >= 9
    assert {s["phases.0.epochs"] for s in drawn} == {2, 3, 4}
    assert abs(sum(s["phases.0.batch"] == 8 for s in drawn) - 16) <= 2
    other = contenders(BODY, Tune(space=space, seed=1), ["an"], "t")[0]
    assert other.settings(1) != an.settings(1)


def test_what_mattered():
    space = {"a": Dimension("log", (0.1, 10)), "b": Dimension("choice", ("x", "y"))}
    rng = random.Random(0)
    trials = [{"first_score": 10.0 * (b == "y") + rng.random(), "settings": {"a": rng.random(), "b": b}}
              for b in "xy" * 20]
    found = mattered(trials, space)
    assert found["b"] > 0.9
    assert found["a"] < 0.2
    assert mattered(trials[:1], space) == {"a": None, "b": None}


@pytest.mark.parametrize(("section", "said"), [
    ({"space": {"method.lr": [0.1]}}, "method.lr is no setting of method 'an' but of role, scob"),
    ({"methods": {"an": {"method.gamme": [1]}}}, "method.gamme is no setting of method 'an'; it has: none"),
    ({"methods": {"an_ls": {"method.smothing": [1]}}}, "did you mean 'method.smoothing'?"),
    ({"methods": {"an_ls": {"method.smoothing": ["x"]}}}, "method.smoothing = 'x'"),
    ({"space": {"phases.0.lrr": [1]}}, "did you mean 'lr'?"),
    ({"space": {"phases.5.lr": [1]}}, "phases is a list; use an index 0..1"),
    ({"space": {"phases.0.lr": {"log": [0, 1]}}}, "magnitudes begin above 0"),
    ({"space": {"phases.0.lr": {"log": [1, 1]}}}, "must be lower than the second"),
    ({"space": {"phases.0.lr": {"lag": [1, 2]}}}, "write a list of choices, {log: [low, high]}"),
    ({"space": {"phases.0.epochs": {"whole": [1, 2.5]}}}, "both ends must be whole numbers"),
    ({"space": {"phases.0.lr": []}}, "no choices"),
    ({"space": {"phases.0.lr": {"range": [-1, 1]}}}, "phases.0.lr = -1"),
    ({"space": {"method.name": ["an"]}}, "methods are compared with"),
    ({}, "nothing to search for method"),
])
def test_mistakes_in_a_space(section, said):
    tune = Tune(**section)
    with pytest.raises(UserError) as error:
        contenders(BODY, tune, list(tune.methods) or ["an"], "t")
    assert said in str(error.value)


def test_grids():
    space = parse_space({"a": [1, "1e-2"], "b": ["x", "y"]}, "t")
    assert grid(space, "t") == [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 0.01, "b": "x"}, {"a": 0.01, "b": "y"}]
