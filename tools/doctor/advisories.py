"""Installed packages with known advisories that matter to what this program does with strangers' files and networks.

A list of our own: it works without a network, never sends what is installed to anybody, and names only what can be
reached from here. It is as old as this version; `pip-audit` (of PyPA) knows the rest and the newest.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from dataclasses import dataclass

from lacuna.tools.doctor.finding import OK, WARNING, Finding

AS_OF = "2026-11"


@dataclass(frozen=True)
class Advisory:
    package: str
    fixed: str
    """The first version without it."""
    name: str
    what: str


ADVISORIES = (
    Advisory("torch", "2.6.0", "CVE-2025-32434", "weights that are read with weights_only=True can run code"),
    Advisory("torch", "2.10.0", "CVE-2026-24747", "weights that are read with weights_only=True can corrupt memory"),
    Advisory("deepspeed", "0.15.1", "CVE-2024-43497", "code from the network"),
    Advisory("ray", "2.8.1", "CVE-2023-6019", "commands through the dashboard's address"),
    Advisory("pillow", "10.3.0", "CVE-2024-28219", "a buffer overflow while colours are converted"),
    Advisory("pyarrow", "14.0.1", "CVE-2023-47248", "Parquet files can run code"),
    Advisory("pyyaml", "5.4", "CVE-2020-14343", "YAML can run code with loaders other than the safe one"),
    Advisory("onnx", "1.16.0", "CVE-2024-27318", "a model's external data can be any file of the machine"),
    Advisory("aiohttp", "3.9.4", "CVE-2024-30251", "a request that never ends"),
    Advisory("tqdm", "4.66.3", "CVE-2024-34062", "code from command-line arguments"),
    Advisory("numpy", "1.22.0", "CVE-2021-41495", "a missing check of memory that could not be had"),
)


def advisories() -> Iterator[Finding]:
    from packaging.version import Version

    affected = []
    for advisory in ADVISORIES:
        try:
            version = importlib.metadata.version(advisory.package)
        except importlib.metadata.PackageNotFoundError:
            continue
        if Version(version) < Version(advisory.fixed):
            affected.append((advisory, version))
    for advisory, version in affected:
        yield Finding("advisories", WARNING, f"{advisory.package} {version}: {advisory.name}, {advisory.what}",
                      f"Run `pip install '{advisory.package}>={advisory.fixed}'`.")
    if not affected:
        yield Finding("advisories", OK, f"none of {len(ADVISORIES)} that were known in {AS_OF} and can be reached from "
                                        "here; `pip-audit` asks for all, with a network")
