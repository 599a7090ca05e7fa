"""Proves that what is imported is declared, and that every page states the same versions, names and Pythons."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import lacuna

ROOT = Path(__file__).resolve().parents[1]
# Where a distribution is imported under another name.
IMPORT_NAMES = {"pyyaml": "yaml", "scikit-learn": "sklearn", "pillow": "PIL", "google-crc32c": "google_crc32c",
                "faiss-cpu": "faiss", "open-clip-torch": "open_clip", "nvidia-dali-cuda120": "nvidia",
                "spdl-io": "spdl"}
# Declared, but imported by nobody here: each with its reason.
NOT_IMPORTED = {"onnx": "torch.onnx imports it",
                "onnxscript": "torch.onnx imports it", "ruff": "a command", "mypy": "a command",
                "pytest-asyncio": "pytest loads it", "pytest-xdist": "pytest loads it",
                "mkdocs-material": "mkdocs loads it: the theme", "types-pyyaml": "types for mypy",
                "types-tqdm": "types for mypy"}
# Imported where it happens to be installed, which no package here asks for: each with its reason.
IF_INSTALLED = {"tensorstore": "one test reads our export with a second implementation of Zarr"}


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def requirements(text: str) -> dict[str, Requirement]:
    found = [Requirement(line) for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


def tracked(*patterns: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files", *patterns], capture_output=True, text=True, cwd=ROOT, check=True)
    return [ROOT / name for name in names.stdout.split("\n") if name and (ROOT / name).is_file()]


def imported(files: list[Path]) -> dict[str, Path]:
    """Top-level name of every module from outside → a file that imports it."""
    own = {*sys.stdlib_module_names, "lacuna", "tests"}
    found = {}
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            found |= {name.split(".")[0]: path for name in names if name.split(".")[0] not in own}
    return found


def import_names(declared: dict[str, Requirement]) -> set[str]:
    return {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in declared}


def test_what_is_imported_is_declared(setup):
    files = [path for path in tracked("*.py") if path.name != "setup.py"]
    shipped = [path for path in files if path.relative_to(ROOT).parts[0] != "tests"]
    always = requirements(setup["options"]["install_requires"])
    extras = {name: requirements(text) for name, text in setup["options.extras_require"].items()}
    of_users = import_names(always).union(*(import_names(extra) for name, extra in extras.items() if name != "test"))
    everything = of_users | import_names(extras["test"])
    # onnxruntime checks an export where it happens to be installed.
    undeclared = {name: path for name, path in imported(shipped).items() if name not in of_users | {"onnxruntime"}}
    assert not undeclared
    assert not {name: path for name, path in imported(files).items() if name not in everything | set(IF_INSTALLED)}


def test_what_is_declared_is_imported(setup):
    files = tracked("*.py")
    declared = requirements(setup["options"]["install_requires"])
    for text in setup["options.extras_require"].values():
        declared |= requirements(text)
    used = set(imported(files))
    unused = {name for name in declared if IMPORT_NAMES.get(name, name.replace("-", "_")) not in used}
    assert unused == set(NOT_IMPORTED)


def test_constraints_fit_what_is_declared(setup):
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9a-z.]+", line) for line in pinned), "a name and a version, nothing else"
    versions = dict(line.split("==") for line in pinned)
    assert len(versions) == len(pinned)
    declared = requirements(setup["options"]["install_requires"]) | requirements(
        setup["options.extras_require"]["test"])
    for name, requirement in declared.items():
        assert versions[name] in requirement.specifier, name


def test_one_version_and_one_name(setup):
    assert setup["metadata"]["version"] == "attr: lacuna.__version__"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == lacuna.__version__
    assert citation["license"] == setup["metadata"]["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / setup["metadata"]["license_files"]).read_text(encoding="utf-8")
    assert setup["metadata"]["name"] == "lacuna-trainer"
    # `lacuna` is another project's name on the public package index.
    wrong = re.compile(r"pip3? install (-\S+ )*['\"]?lacuna(?![-\w])")
    assert wrong.search("pip install -q 'lacuna[onnx]'")
    for path in tracked("*.md", "*.py", "*.yml", "*.yaml", "Makefile"):
        assert path == Path(__file__) or not wrong.search(path.read_text(encoding="utf-8")), path


def test_the_same_pythons_everywhere(setup):
    pythons = ["3.11", "3.12"]
    classifiers = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    assert classifiers == pythons
    supported = SpecifierSet(setup["options"]["python_requires"])
    assert [f"3.{minor}" for minor in range(8, 20) if f"3.{minor}" in supported] == pythons
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))["jobs"]
    for job in ("test", "wheel"):
        assert jobs[job]["strategy"]["matrix"]["python-version"] == pythons
    assert "Python 3.11 or 3.12" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["bug", "feature", "config"])
def test_issue_templates_are_what_the_form_expects(name):
    body = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{name}.yml").read_text(encoding="utf-8"))
    if name == "config":
        assert set(body) == {"blank_issues_enabled"}
        return
    assert {"name", "description", "body"} <= set(body)
    for field in body["body"]:
        assert field["type"] in ("textarea", "input", "dropdown", "checkboxes", "markdown")
        assert field["id"]
        assert field["attributes"]["label"]
