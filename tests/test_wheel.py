"""Proves that the wheel holds the whole package, is never built without contents, and trains far from any clone."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("trainer", "state_store", "data_pipelines", "tools", "configs")


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=True)
    return [name for name in listed.stdout.splitlines() if os.path.lexists(ROOT / name)]


def copy_of_the_tree(folder: Path) -> Path:
    """What a fresh clone would hold, links as links."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def build(tree: Path, out: Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "pip", "wheel", str(tree), "--no-deps", "--no-build-isolation",
                           "--no-index", "--wheel-dir", str(out)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = build(copy_of_the_tree(folder / "tree"), folder / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = (folder / "out").glob("*.whl")
    return made


def test_every_file_of_the_package_is_in_it(wheel):
    """Modules, configs (YAML and DeepSpeed's JSON), pages (HTML, CSS, JS) and py.typed."""
    expected = set()
    for name in tracked():
        if name.split("/")[0] in ROOMS:
            expected.add(f"lacuna/{name}")
        elif name.startswith("src/lacuna/") and not os.path.islink(ROOT / name):
            expected.add(name.removeprefix("src/"))
    with zipfile.ZipFile(wheel) as archive:
        there = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert there == expected
    assert {"lacuna/py.typed", "lacuna/configs/demo.yaml", "lacuna/configs/deepspeed/zero1.json", "lacuna/api/runs.py",
            "lacuna/trainer/run.py", "lacuna/tools/explore/app.html", "lacuna/tools/report/page.css"} <= there


@pytest.mark.parametrize("room", ["trainer", "configs"])
def test_without_links_the_build_fails_and_says_why(tmp_path, room):
    """With core.symlinks=false git writes a link's target into a text file."""
    tree = copy_of_the_tree(tmp_path / "tree")
    link = tree / "src" / "lacuna" / room
    target = os.readlink(link)
    link.unlink()
    link.write_text(target)
    done = build(tree, tmp_path / "out")
    assert done.returncode != 0
    assert f"src/lacuna/{room} is not a folder" in done.stdout + done.stderr
    assert "core.symlinks" in done.stdout + done.stderr
    assert not list(tmp_path.glob("out/*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """bin/ of a fresh venv with the wheel in it. The dependencies are those of this Python: a path in a .pth file makes
    them importable, but not what other .pth files there point to, such as an editable install of this clone."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index",
                    str(wheel)], check=True, capture_output=True)
    # The launcher's script, as pip would have written it here.
    lines = (Path(sys.executable).parent / "deepspeed").read_text().splitlines()
    script = folder / "bin" / "deepspeed"
    script.write_text("\n".join([f"#!{python}", *lines[1:]]) + "\n")
    script.chmod(0o755)
    return folder / "bin"


def run(installed: Path, folder: Path, *words: str) -> str:
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
                  "PATH": f"{installed}{os.pathsep}{variables['PATH']}"}
    done = subprocess.run([str(installed / words[0]), *words[1:]], cwd=folder, env=variables, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def test_installed_it_is_the_wheels_own(installed, tmp_path):
    where = run(installed, tmp_path, "python", "-c", "import lacuna; print(lacuna.__file__)").strip()
    assert where.startswith(str(installed.parent))
    assert "demo" in run(installed, tmp_path, "lacuna", "configs")
    code = "import sys, lacuna; print(*[lacuna.load_config(name).method['name'] for name in sys.argv[1:]])"
    found = run(installed, tmp_path, "python", "-c", code, "demo", "cole:coco14_an_linear")
    assert found.split() == ["gr", "an"]


@pytest.mark.long
def test_installed_it_trains_in_an_empty_folder(installed, tmp_path):
    lines = run(installed, tmp_path, "lacuna", "demo", "--out", "demo", "--json").strip().splitlines()
    scores = {row["run"]: row["test_map"] for row in json.loads(lines[-1])}
    assert len(scores) == 3
    assert all(score > 50 for score in scores.values())
    run(installed, tmp_path, "lacuna", "train", "demo", "name=again", "run_folder=mine", "phases.0.epochs=1",
        "phases.1.epochs=1", "--ranks", "2")
    results = json.loads((tmp_path / "mine" / "again" / "results.json").read_text())
    assert results["test"]["map"] > 20
