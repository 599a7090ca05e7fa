"""What `lacuna tune` is asked to do: the `tune:` section of a config or a file, checked against the methods."""

from __future__ import annotations

import difflib
import hashlib
import math
from dataclasses import dataclass
from typing import Any

from pydantic import Field, model_validator

from lacuna.basics.errors import UserError
from lacuna.basics.hashing import mix
from lacuna.trainer.config.data_section import Section
from lacuna.trainer.config.files import Change, changed
from lacuna.trainer.config.sections import Config, parse_config
from lacuna.trainer.config.spaces import Space, parse_space
from lacuna.trainer.config.validation import validated
from lacuna.trainer.methods import METHODS

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71)


class Tune(Section):
    """The section `tune:`."""

    space: dict[str, Any] = Field(default_factory=dict)
    """Settings of every method that is tried: section.key → a list of choices, {log: [low, high]}, {range: [low, high]}
    or {whole: [low, high]}."""
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Method → its own further settings. With several the methods are compared, each with the whole budget."""
    trials: int | None = Field(None, gt=0)
    """Of each method (default 27, if hours are not given)."""
    hours: float | None = Field(None, gt=0)
    """Of the whole search, over all its launches, instead of a number of trials."""
    halving: int = Field(3, ge=1)
    """At every rung one in so many trials goes on, for so many times as long; 1: all of them go to their end."""
    first_rung: int = Field(1, ge=1)
    """Epochs that every trial gets at least."""
    seed: int = 0
    """Of the draws; the runs' own seed is the config's."""

    @model_validator(mode="after")
    def _one_budget(self) -> Tune:
        if self.trials is not None and self.hours is not None:
            raise UserError(f"trials = {self.trials} and hours = {self.hours}: give one of them")
        return self


@dataclass(frozen=True)
class Contender:
    """A method with what is searched for it; trial 0 is the config as it stands, so that a search cannot lose to it."""

    method: str
    body: dict  # the config, with this method
    space: Space
    seed: int
    where: str

    def settings(self, trial: int) -> dict[str, Any]:
        """Of a trial, whatever the number of trials and the other methods are: steps by roots of primes fill a space
        more evenly than lots, and methods share the draws of the settings that they share."""
        if trial == 0:
            return {}
        return {key: dimension.at(_place(self.seed, key, number, trial))
                for number, (key, dimension) in enumerate(self.space.items())}

    def body_of(self, trial: int) -> dict:
        return changed(self.body, self.changes(self.settings(trial)))

    def changes(self, settings: dict[str, Any]) -> list[Change]:
        return [(key.split("."), value, f"{self.where}: {key}") for key, value in settings.items()]


def _place(seed: int, key: str, number: int, trial: int) -> float:
    start = mix(seed, int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")) / 2**64
    return (start + trial * math.sqrt(_PRIMES[number % len(_PRIMES)])) % 1.0


def contenders(body: dict, tune: Tune, methods: list[str], where: str) -> list[Contender]:
    """One for every method, checked: keys, choices and the ends of ranges are all legal for it."""
    shared = parse_space(tune.space, f"{where}: space")
    _check_shared(shared, methods, f"{where}: space")
    found = []
    for method in methods:
        own = parse_space(tune.methods.get(method, {}), f"{where}: methods.{method}")
        _check_method_keys(own, method, f"{where}: methods.{method}")
        if not shared and not own:
            raise UserError(f"{where}: nothing to search for method {method!r}; add e.g. "
                            "space: {phases.0.lr: {log: [1e-4, 1e-2]}}.")
        with_method = changed(body, [(["method", "name"], method, where)])
        contender = Contender(method, with_method, {**shared, **own}, tune.seed, where)
        for key, dimension in contender.space.items():
            for value in dimension.values:
                checked(changed(with_method, contender.changes({key: value})), f"{where}: {key} = {value!r}")
        found.append(contender)
    return found


def checked(body: dict, where: str) -> Config:
    config = parse_config(body, where)
    method = config.method.get("name")
    if method in METHODS:
        validated(METHODS[method].settings_type, config.method, f"{where}: method {method!r}")
    return config


def _check_shared(space: Space, methods: list[str], where: str) -> None:
    if "method.name" in space:
        raise UserError(f"{where}: method.name: methods are compared with `methods: {{an: {{}}, role: {{…}}}}` or "
                        "--methods, so that each has the same budget.")
    for method in methods:
        _check_method_keys(space, method, where)


def _check_method_keys(space: Space, method: str, where: str) -> None:
    """A setting of another method is named as such: it belongs below that one."""
    own = set(METHODS[method].settings_type.model_fields) - {"name"}
    for key in space:
        section, _, name = key.partition(".")
        if section != "method" or name.partition(".")[0] in own:
            continue
        others = [other for other, kind in METHODS.items() if name in kind.settings_type.model_fields]
        if others:
            raise UserError(f"{where}: {key} is no setting of method {method!r} but of {', '.join(others)}. Write it "
                            f"below that one: methods: {{{others[0]}: {{{key}: …}}}}.")
        close = difflib.get_close_matches(name, own, 1)
        hint = f"did you mean 'method.{close[0]}'?" if close else f"it has: {', '.join(sorted(own)) or 'none'}."
        raise UserError(f"{where}: {key} is no setting of method {method!r}; {hint}")
