"""Proves that every command helps with an example, speaks JSON, and answers mistakes with exit code 2 and one line."""

from __future__ import annotations

import argparse
import re
import shlex

import pytest

import lacuna
from lacuna.tools.bench import BENCHES
from lacuna.tools.cli import COMMANDS, leaves, main, open_command, parse


def parsers(name: str) -> list[argparse.ArgumentParser]:
    """The command's parser, or those of its actions."""
    return leaves(open_command(name)[1])


def examples(text: str) -> list[str]:
    """Indented commands of a help text, whole and without the remark behind them."""
    found = re.findall(r"^  (lacuna (?:[^\\\n]|\\\n)+)", text, re.MULTILINE)
    return [re.split(r" {2,}|\s+[#>]", re.sub(r"\s*\\\n\s*", " ", line))[0] for line in found]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_an_example(name, capsys):
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert f"  lacuna {name}" in out, "an indented line that can be copied"
    assert COMMANDS[name][1][:30] in " ".join(out.split())
    for leaf in parsers(name):
        assert f"  {leaf.prog}" in leaf.format_help(), f"{leaf.prog} --help has no example"
        for action in leaf._actions:
            assert action.help, f"{leaf.prog} {action.dest} explains nothing"


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_legal(name):
    """Every example of every help text can be parsed; what it names is not looked for."""
    shown = {line for parser in (open_command(name)[1], *parsers(name)) for line in examples(parser.format_help())}
    assert shown
    for line in shown:
        words = shlex.split(line)[1:]
        if "--help" not in words:
            parse(words)


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"bench", "train"}))
def test_output_for_programs(name):
    """Left out: `bench`, whose last line is JSON always, and `train`, which leaves metrics.jsonl and results.json."""
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
    assert "did you mean `lacuna train`?" in capsys.readouterr().err


def test_a_path_that_cannot_be_written_is_a_mistake(tmp_path, capsys):
    (tmp_path / "file").write_text("not a folder")
    out = str(tmp_path / "file" / "digits")
    assert main(["shards", "make", "digits", "--count", "4", "--streams", "1", "--out", out]) == 2
    err = capsys.readouterr().err
    assert str(tmp_path / "file") in err
    assert "a part of this path is a file, not a folder" in err
    assert "Traceback" not in err


def test_version_and_misspelt_commands(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lacuna {lacuna.__version__}\n"
    assert main(["reprot"]) == 2
    assert "did you mean `lacuna report`?" in capsys.readouterr().err
    assert main(["qqq"]) == 2
    assert "there are: doctor, demo" in capsys.readouterr().err


def test_every_benchmark_has_a_line_of_its_own(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    lines = capsys.readouterr().out.splitlines()
    for name in BENCHES:
        assert any(re.match(rf"  {name} +[A-Z].+\.$", line) for line in lines), name
