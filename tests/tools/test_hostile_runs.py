"""Run folders of strangers cannot run code, show files from elsewhere, hang a reader or eat its memory."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lacuna.basics.errors import UserError
from lacuna.tools.cli import main
from lacuna.tools.passes.trained import open_trained, read_weights
from lacuna.tools.run_files import run_config
from tests.helpers.launching import environment
from tests.helpers.stranger_runs import CONFIG, STEP, TABLE, make_run, sign

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(9 * [f'*{before}'])}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True))


@pytest.fixture
def run(tmp_path) -> Path:
    make_run(tmp_path / "run")
    return tmp_path / "run"


def refused(capsys, words: list[str]) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["metrics.jsonl", "results.json", "config.yaml", f"{STEP}/model.safetensors", "state"])
def test_links_out_of_the_folder_are_not_followed(run, tmp_path, capsys, name):
    secret = tmp_path / "secret"
    secret.write_text('{"kind": "train", "step": 1, "password": 12345}\n')
    path = run / name
    if path.exists():
        path.unlink()
    path.symlink_to(secret)
    for words in (["report", str(run)], ["inspect", str(run)], ["export", str(run), "--out", str(tmp_path / "model")]):
        said = refused(capsys, words)
        assert f"{path}: a link to {secret}, outside of the run folder" in said
        assert "12345" not in said
    assert not (run / "report.html").exists()


def test_links_within_the_folder_are(run):
    (run / "latest").symlink_to(run / STEP)
    assert run_config(str(run)).name == "run"


def test_a_pipe_does_not_hang_a_reader(run, capsys):
    (run / "metrics.jsonl").unlink()
    os.mkfifo(run / "metrics.jsonl")
    assert "neither a file nor a folder" in refused(capsys, ["report", str(run)])


def test_a_sparse_file_is_not_read_into_memory(run, capsys):
    with open(run / "metrics.jsonl", "wb") as f:
        f.truncate(1 << 40)
    assert "too much to be a run's metrics.jsonl" in refused(capsys, ["report", str(run)])


def test_aliases_that_unfold_without_end_are_refused_in_bounded_memory(run, tmp_path):
    """By reading commands and by the trainer, in a process that may take 4 GB of addresses."""
    (run / "config.yaml").write_text(BOMB)
    (tmp_path / "bomb.yaml").write_text(BOMB)
    (tmp_path / "loop.yaml").write_text("name: &x [*x]\n")
    script = ("import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
              "from lacuna.trainer.config.files import load_config\nfrom lacuna.tools.run_files import run_config\n"
              f"for read in (lambda: run_config({str(run)!r}),\n"
              f"             lambda: load_config({str(tmp_path / 'bomb.yaml')!r}, []),\n"
              f"             lambda: load_config({str(tmp_path / 'loop.yaml')!r}, [])):\n"
              "    try:\n        read()\n    except Exception as error:\n        print(type(error).__name__, error)\n")
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True,
                          timeout=300)
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stdout + done.stderr
    assert all(line.startswith("UserError ") for line in lines)
    assert "values, more than 100,000" in lines[0]
    assert "values, more than 100,000" in lines[1]
    assert "an alias stands inside of what it names" in lines[2]


class Trap:
    def __reduce__(self):
        return (os.mkdir, (os.environ["TRAP"],))


def test_pickles_of_a_checkpoint_are_not_opened_by_readers(run, tmp_path, capsys, monkeypatch):
    """DeepSpeed's files are pickles: only resuming a run opens them, and only after the commit names them."""
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    (run / STEP / "engine").mkdir()
    (run / STEP / "engine" / "mp_rank_00_model_states.pt").write_bytes(pickle.dumps(Trap()))
    (run / STEP / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    sign(run, {})
    assert main(["report", str(run)]) == 0
    with pytest.raises(UserError, match="not whole safetensors"):
        read_weights(open_trained(str(run)))
    for words in (["export", str(run), "--out", str(tmp_path / "model")], ["inspect", str(run)]):
        assert main(words) == 2
    assert not (tmp_path / "sprung").exists()
    pickle.loads(pickle.dumps(Trap()))
    assert (tmp_path / "sprung").exists(), "the trap works"


def test_tensors_that_claim_more_than_the_file_holds_take_no_memory(run):
    claim = {"dtype": "F32", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 42]}
    header = json.dumps({"head.weight": claim}).encode()
    (run / STEP / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    sign(run, {})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="not whole safetensors"):
        read_weights(open_trained(str(run)))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_names_cannot_leave_their_place_on_the_page(run, capsys):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    (run / "config.yaml").write_text(json.dumps({**CONFIG, "phases": [{**CONFIG["phases"][0], "name": evil}]}))
    (run / "test_classes.csv").write_text(TABLE.replace("cat", f'"{evil}"'))
    (run / "versions.json").write_text(json.dumps({evil: evil}))
    named = run.rename(run.with_name("<img src=x onerror=alert(1)>"))
    assert main(["report", str(named)]) == 0
    page = (named / "report.html").read_text()
    assert evil not in page
    assert "<img src=x" not in page
    assert "alert(1)" in page, "it is there, as text"
