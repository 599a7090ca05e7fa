"""Proves that `lacuna doctor` measures this machine, names what is wrong with advice, and says so in its exit code."""

from __future__ import annotations

import importlib.metadata
import json
import resource

import pytest

from lacuna.tools import doctor
from lacuna.tools.cli import main
from lacuna.tools.doctor.advisories import advisories


def examine(capsys, *options: str) -> tuple[int, dict[str, dict]]:
    code = main(["doctor", "--json", *options])
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] == (code == 0)
    return code, {check["check"]: check for check in report["checks"]}


def test_this_machine(tmp_path, capsys):
    """Everything but Ray's start is looked at for real; the trial file and object are gone afterwards."""
    code, found = examine(capsys, "--quick", "--folder", str(tmp_path), "--s3", "memory://doctor")
    assert code == 0
    assert found["bf16 on the CPU"]["level"] in (doctor.OK, doctor.WARNING)
    assert {"python", "packages", "cpu", "gpu", "disk space", "open files", "deepspeed", "launcher",
            "object storage"} <= set(found)
    assert importlib.metadata.version("torch") in found["packages"]["found"]
    (speed,) = doctor.disk_speed(str(tmp_path))
    assert "MB/s" in speed.found
    assert list(tmp_path.iterdir()) == []
    import fsspec

    assert fsspec.filesystem("memory").find("/doctor") == []


def test_text_has_a_line_a_check_and_advice(capsys):
    assert main(["doctor", "--quick"]) == 0
    out = capsys.readouterr().out
    assert "ok       python " in out
    assert out.splitlines()[-1].endswith("0 problems")
    finding = doctor.Finding("gpu", doctor.WARNING, "none", "Do this.")
    assert doctor.as_line(finding).splitlines() == ["warning  gpu            none", " " * 24 + "→ Do this."]


def test_low_limit_and_small_shared_memory_are_warnings(monkeypatch, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    try:
        (finding,) = doctor.file_limit()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert finding.level == doctor.WARNING
    assert "ulimit -n" in finding.advice
    (absent,) = doctor.shared_memory(str(tmp_path / "none"))
    assert absent.level == doctor.WARNING


def test_wrong_packages_are_a_problem(monkeypatch, capsys):
    """Requirements that this environment does not fulfil are named with what is needed."""
    wanted = ["numpy>=999", "no-such-package-anywhere", "pytest>=1; extra == 'test'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    assert examine(capsys, "--quick")[0] == 1
    bad = [f for f in doctor.versions() if f.level == doctor.PROBLEM]
    assert "needed: >=999" in bad[0].found
    assert "no-such-package-anywhere is missing" in bad[0].found
    assert "make install" in bad[0].advice


def test_another_projects_lacuna_is_named(monkeypatch, tmp_path, capsys):
    """Its distribution as pip leaves it behind; without it nothing is said."""
    assert list(doctor.namesake()) == []
    metadata = tmp_path / "lacuna-2026.1.51.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: lacuna\nVersion: 2026.1.51\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    code, found = examine(capsys, "--quick")
    assert code == 0, "a warning, not a problem"
    assert found["namesake"]["level"] == doctor.WARNING
    assert "`lacuna` 2026.1.51" in found["namesake"]["found"]
    assert "pip uninstall lacuna" in found["namesake"]["advice"]


def test_unreachable_places(monkeypatch, tmp_path, capsys):
    """An endpoint where nobody listens is a problem with advice; a folder that is not there is the user's mistake."""
    from s3fs import S3FileSystem

    monkeypatch.setattr("lacuna.basics.retries.ATTEMPTS", 1)
    monkeypatch.setattr(S3FileSystem, "retries", 1)
    for name, value in {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "a",
                        "AWS_SECRET_ACCESS_KEY": "b", "AWS_EC2_METADATA_DISABLED": "true",
                        "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    (finding,) = doctor.object_storage("s3://bucket/prefix")
    S3FileSystem.clear_instance_cache()
    assert finding.level == doctor.PROBLEM
    assert "AWS_ENDPOINT_URL" in finding.advice
    assert main(["doctor", "--folder", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_a_check_that_breaks_is_a_finding():
    def shaky():
        raise RuntimeError("unplugged")
        yield

    (finding,) = doctor._guarded(shaky)
    assert (finding.check, finding.level) == ("shaky", doctor.PROBLEM)
    assert "unplugged" in finding.found


@pytest.mark.long
def test_ray_starts():
    (finding,) = doctor.ray_starts()
    assert finding.level == doctor.OK, finding


def test_packages_with_known_advisories_are_named(monkeypatch):
    assert [finding.level for finding in advisories()] == [doctor.OK], "the versions that are installed"
    installed = {"torch": "2.5.1", "pillow": "13.0.0", "ray": "2.8.1"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = list(advisories())
    assert [finding.level for finding in found] == [doctor.WARNING] * 2
    assert "torch 2.5.1: CVE-2025-32434" in found[0].found
    assert found[1].advice == "Run `pip install 'torch>=2.10.0'`."
