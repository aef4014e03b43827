"""What the guest agent needs beside its own wheel, to the byte: `make pins` writes the pinned requirements and the SBOM.

The versions are those that the tests ran with, for `make` keeps to the pins when it sets up; which files these are is the
package index's word, as pip gives it for each Python and processor. All else is read from what is installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, distribution
from itertools import product
from pathlib import Path
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "deploy/requirements/agent.txt"
SBOM = ROOT / "deploy/requirements/agent.cdx.json"
PYTHONS = ("3.11", "3.12", "3.13", "3.14", "3.15")
PROCESSORS = ("x86_64", "aarch64")
# pip takes a platform by its name: a wheel for manylinux2014 is for both of the others too, and does not always say so.
PLATFORMS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014")
# A later Python needs the same or less: what only old ones need is pinned for all.
OLDEST = {"python_version": PYTHONS[0], "python_full_version": f"{PYTHONS[0]}.0"}
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAD = f"""\
# What gpu-guest-agent needs beside its own wheel, for Python {PYTHONS[0]} to {PYTHONS[-1]} on Linux with glibc:
# {" and ".join(PROCESSORS)}.
# Made by `make pins`; how to use it: docs/packaging.md.
--only-binary :all:
"""


@dataclass(frozen=True, slots=True)
class Pin:
    """One distribution. `files` maps the name of each wheel to its SHA-256 in hex, `needs` are canonical names."""

    name: str
    version: str
    licence: str
    needs: tuple[str, ...]
    files: Mapping[str, str]

    @property
    def purl(self) -> str:
        return f"pkg:pypi/{self.name}@{self.version}"


def applying(
    requires: Iterable[str], extras: Collection[str] = (), environment: Mapping[str, str] | None = None
) -> list[Requirement]:
    """Those of a distribution's Requires-Dist that hold with these extras, here or where `environment` says."""
    found = map(Requirement, requires)
    return [
        one
        for one in found
        if one.marker is None or any(one.marker.evaluate({**(environment or {}), "extra": extra}) for extra in ("", *extras))
    ]


def closure(
    requires: Iterable[str], extras: Collection[str] = (), environment: Mapping[str, str] | None = None
) -> dict[str, Distribution]:
    """What is installed of all that `requires` leads to, by canonical name. A version out of its range fails."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = applying(requires, extras, environment)
    while todo:
        one = todo.pop()
        name, wanted = canonicalize_name(one.name), frozenset(one.extras)
        if (name, wanted) not in seen:
            seen.add((name, wanted))
            found[name] = distribution(name)
            assert one.specifier.contains(found[name].version, prereleases=True), f"{one}: {found[name].version} is installed"
            todo += applying(found[name].requires or [], wanted, environment)
    return found


def agent_requires() -> list[str]:
    """What pyproject.toml says the agent needs."""
    return [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["agent"]]


@cache
def agent_closure() -> dict[str, Distribution]:
    return closure(agent_requires(), environment=OLDEST)


def pins(files: Mapping[str, Mapping[str, str]]) -> list[Pin]:
    """Of what is installed, with these files by name."""
    return [
        Pin(name, found.version, licence(found), names(found.requires or []), files[name])
        for name, found in sorted(agent_closure().items())
    ]


def names(requires: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({canonicalize_name(one.name) for one in applying(requires, environment=OLDEST)}))


def licence(found: Distribution) -> str:
    """An SPDX expression where it has one, else what it says in words."""
    metadata = found.metadata
    for field in ("License-Expression", "License"):
        if field in metadata:
            return metadata[field]
    return " AND ".join(line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier", []) if line.startswith("License"))


def indexed_files() -> dict[str, dict[str, str]]:
    """By name, the wheels that pip would take of the package index, with SHA-256, for any of PYTHONS and PROCESSORS."""
    wanted = [f"{name}=={found.version}" for name, found in agent_closure().items()]
    files: dict[str, dict[str, str]] = {name: {} for name in agent_closure()}
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--only-binary=:all:", "--report=-", "--target=none"]
    for python, processor in product(PYTHONS, PROCESSORS):
        place = [f"--python-version={python}", *(f"--platform={platform}_{processor}" for platform in PLATFORMS)]
        command = [sys.executable, "-m", "pip", "install", *options, *place, *wanted]
        report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        for one in report["install"]:
            download = one["download_info"]
            wheel = download["url"].rpartition("/")[2]
            files[canonicalize_name(one["metadata"]["name"])][wheel] = download["archive_info"]["hashes"]["sha256"]
    return files


def requirements_text(pinned: Iterable[Pin]) -> str:
    lines = [
        " \\\n    ".join([f"{p.name}=={p.version}", *(f"--hash=sha256:{h}" for h in sorted(p.files.values()))]) for p in pinned
    ]
    return HEAD + "\n".join(lines) + "\n"


def sbom_text(pinned: Iterable[Pin]) -> str:
    """CycloneDX 1.6; without the time and the number of its making, so that equal pins give equal bytes."""
    pinned = list(pinned)
    purls = {pin.name: pin.purl for pin in pinned}
    own = f"pkg:pypi/{PROJECT['name']}@{PROJECT['version']}"
    graph = {own: names(agent_requires()), **{pin.purl: pin.needs for pin in pinned}}
    bom = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": PROJECT["name"],
                "version": PROJECT["version"],
                "description": "gpu-guest-agent and what it needs",
                "licenses": [spdx(PROJECT["license"])],
                "purl": own,
            }
        },
        "components": [
            {
                "type": "library",
                "bom-ref": pin.purl,
                "name": pin.name,
                "version": pin.version,
                "licenses": [spdx(pin.licence)],
                "purl": pin.purl,
                "components": [
                    {"type": "file", "name": wheel, "hashes": [{"alg": "SHA-256", "content": pin.files[wheel]}]}
                    for wheel in sorted(pin.files)
                ],
            }
            for pin in pinned
        ],
        "dependencies": [{"ref": ref, "dependsOn": [purls[name] for name in needs]} for ref, needs in graph.items()],
    }
    return json.dumps(bom, indent=2) + "\n"


def spdx(stated: str) -> dict[str, Any]:
    """An entry of CycloneDX's `licenses`."""
    try:
        return {"expression": canonicalize_license_expression(stated)}
    except InvalidLicenseExpression:
        return {"license": {"name": stated}}


def sbom_files(bom: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """By name, the files in an SBOM of ours."""
    return {
        component["name"]: {file["name"]: file["hashes"][0]["content"] for file in component["components"]}
        for component in bom["components"]
    }


def pinned_hashes() -> dict[str, set[str]]:
    """By `name==version`, the hashes in the pinned requirements."""
    entries = REQUIREMENTS.read_text().replace("\\\n", "").splitlines()
    return {entry.split()[0]: set(re.findall(r"--hash=sha256:([0-9a-f]{64})\b", entry)) for entry in entries if "==" in entry}


if __name__ == "__main__":
    made = pins(indexed_files())
    REQUIREMENTS.write_text(requirements_text(made))
    SBOM.write_text(sbom_text(made))
