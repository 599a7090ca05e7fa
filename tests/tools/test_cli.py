"""Proves that every command helps with an example, speaks JSON, and answers mistakes with exit code 2 and one line."""

from __future__ import annotations

import argparse
import importlib

import pytest

from tools.cli import COMMANDS, main


def parsers(name: str) -> list[argparse.ArgumentParser]:
    """The command's parser, or those of its actions."""
    parser = argparse.ArgumentParser(prog=f"lacuna {name}")
    importlib.import_module(COMMANDS[name][0]).configure(parser)
    return leaves(parser)


def leaves(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return [leaf for action in inner for sub in action.choices.values() for leaf in leaves(sub)] or [parser]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert f"  lacuna {name}" in out, "an indented line that can be copied"
    assert COMMANDS[name][1][:30] in " ".join(out.split())
    for leaf in parsers(name):
        for action in leaf._actions:
            assert action.help, f"{leaf.prog} {action.dest} explains nothing"


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"bench"}))
def test_output_for_programs(name):
    """`bench` is left out: its last line is JSON always."""
    for leaf in parsers(name):
        assert "--json" in leaf._option_string_actions, leaf.prog


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_option_is_a_mistake(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--no-such-option"])
    assert end.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_overview_and_unknown_commands(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"lacuna {name} " in out for name in COMMANDS)
    assert "Exit codes: 0" in out
    assert main([]) == 2
    assert main(["trian"]) == 2
    assert "there are: doctor" in capsys.readouterr().err
