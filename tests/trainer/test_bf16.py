"""bf16 on a CPU that only claims to have it: found out in a child process, cured where possible, refused in words."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from lacuna.tools.doctor import machine
from lacuna.trainer.bf16 import check
from tests.helpers import lame_cpu
from tests.helpers.launching import Launch, environment, losses
from tests.helpers.run_configs import config

MAKE_SAFE = "from lacuna.trainer.bf16 import check; print(check.make_safe())"


def python(code: str, **variables: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=900,
                          env=environment(**variables))


def test_the_real_probe_on_this_machine(tmp_path):
    """Whatever CPU this is: what is said to work does, in a process of its own, with oneDNN's own kernels."""
    done = python(MAKE_SAFE + "; import torch; from lacuna.trainer.bf16 import probe; print(probe.main())",
                  XDG_CACHE_HOME=str(tmp_path))
    if done.returncode:
        assert "train.precision = 'bf16' does not work on this CPU" in done.stderr
        return
    assert done.stdout.splitlines()[-1] == "0"
    noted = json.loads((tmp_path / "lacuna" / "bf16.json").read_text())
    assert noted["needed"] in (None, *check.INSTRUCTION_SETS)
    assert (noted["needed"] is None) == (done.stdout.splitlines()[0] == "None")


@pytest.fixture
def cpu(monkeypatch, tmp_path):
    """Makes the children of this process run on a pretended CPU that can do bf16 with these instruction sets only."""
    def become(*works: str) -> None:
        for name, value in environment(**lame_cpu.variables(tmp_path, *works)).items():
            monkeypatch.setenv(name, value)

    monkeypatch.delenv(check.VARIABLE, raising=False)
    return become


@pytest.mark.parametrize("works", ["AVX512_CORE_BF16", pytest.param("AVX512_CORE", marks=pytest.mark.long),
                                   pytest.param("AVX2", marks=pytest.mark.long)])
def test_an_instruction_set_that_works_is_found(monkeypatch, tmp_path, cpu, works):
    cpu(works)
    assert check.needed_instruction_set() == works
    assert json.loads((tmp_path / "cache" / "lacuna" / "bf16.json").read_text())["needed"] == works
    (finding,) = machine.bf16()
    assert finding.level == "warning"
    assert finding.found == f"works only with ONEDNN_MAX_CPU_ISA={works}"
    monkeypatch.setenv(check.VARIABLE, works)
    assert check.needed_instruction_set() is None, "what the user has set works, and is left alone"


def test_a_cpu_without_any_is_refused(cpu):
    cpu()
    (finding,) = machine.bf16()
    assert finding.level == "warning"
    assert "does not work on this CPU: a trial died by SIGILL (signal 4, illegal instruction" in finding.found
    assert "train.precision=fp32" in finding.advice


def test_a_process_that_used_onednn_before_is_refused_instead_of_killed(tmp_path):
    used = "import torch; torch.nn.functional.linear(torch.zeros(2, 2), torch.zeros(2, 2)); "
    done = python(used + MAKE_SAFE, **lame_cpu.variables(tmp_path, "AVX512_CORE_BF16"))
    assert done.returncode == 1
    assert "needs ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 on this CPU, but this process has used oneDNN" in done.stderr


def test_ranks_share_one_trial(tmp_path, cpu):
    """Many at once: one does the trials, the others wait for what it notes; a torn note is no obstacle."""
    cpu("AVX512_CORE_BF16")
    note = tmp_path / "cache" / "lacuna" / "bf16.json"
    note.parent.mkdir(parents=True)
    note.write_text('{"machine": "x", "nee')
    count = ("from lacuna.trainer.bf16 import check; find = check._find; "
             "check._find = lambda: print('tried') or find(); print(check.needed_instruction_set())")
    ranks = [subprocess.Popen([sys.executable, "-c", count], stdout=subprocess.PIPE, text=True)
             for _ in range(4)]
    outputs = [rank.communicate(timeout=900)[0].split() for rank in ranks]
    assert sorted(outputs) == [["AVX512_CORE_BF16"]] * 3 + [["tried", "AVX512_CORE_BF16"]]


def test_a_folder_that_cannot_be_written_is_no_obstacle(monkeypatch, tmp_path, cpu):
    cpu("AVX512_CORE_BF16")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert check.needed_instruction_set() == "AVX512_CORE_BF16"


def test_a_run_on_such_a_cpu_trains(digit_shards, tmp_path):
    """Two ranks that would die by SIGILL at their first step say what they set, and train; or the run is refused."""
    body = config(digit_shards, "lame")
    body["phases"] = body["phases"][:1]
    launch = Launch(body, tmp_path, 2, "train.precision=bf16", **lame_cpu.variables(tmp_path, "AVX512_CORE_BF16"))
    launch.ok()
    assert launch.text().count("ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 is set") == 1
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 is set" in (launch.folder / "log.txt").read_text()
    assert losses(launch.folder)
    (tmp_path / "cache" / "lacuna" / "bf16.json").unlink()
    launch = Launch({**body, "name": "lost"}, tmp_path, 1, "train.precision=bf16", **lame_cpu.variables(tmp_path))
    assert launch.wait() == 2
    assert "lacuna: train.precision = 'bf16' does not work on this CPU: a trial died by SIGILL" in launch.text()
