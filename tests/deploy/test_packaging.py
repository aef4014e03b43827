"""The wheel: what is in it, that its bytes can be made again, and that each program runs from an environment that holds nothing
but the wheel and what its extra names. And the agent's pins: they are what it needs, and what was tested."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import urllib.request
import venv
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy import pins
from tests.deploy.pins import ROOT
from tests.fakes.nvml import build_fake_nvml
from tests.house.test_imports import OURS, of, packages, reached
from tests.postgres import postgres_url
from tests.processes import free_port, running

__all__ = ["postgres_url"]

PACKAGES = {"gpuwire": "gpuwire", "guest_agent": "guest_agent", "host_proxy": "host_proxy", "aggregator": "aggregator"} | {
    "migrations": "aggregator/_migrations"
}
SOURCE_DATE_EPOCH = 1_700_000_000
ROOMS = {"agent": "guest_agent", "proxy": "host_proxy", "aggregator": "aggregator"}
# Data, and what SQLAlchemy loads by the name in a URL.
NEVER_IMPORTED = {"tzdata", "psycopg"}


def copy_of_the_source(folder: Path) -> Path:
    """As a clone has it: without what programs and tools leave behind."""
    shutil.copytree(
        ROOT, folder, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "demo-data", "*-spool")
    )
    return folder


def build(kind: str, source: Path, into: Path) -> Path:
    """What the build backend makes of `source`: its wheel or its sdist. As `make wheel` has it: at a given time, mode 0644."""
    into.mkdir(parents=True)
    call = f"from setuptools import build_meta; build_meta.build_{kind}({str(into)!r})"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(SOURCE_DATE_EPOCH)}
    command = [sys.executable, "-c", call]
    done = subprocess.run(command, cwd=source, env=environment, umask=0o022, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_of_the_source(tmp_path_factory.mktemp("source") / "clone")


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", source, tmp_path_factory.mktemp("wheel") / "dist")


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Metadata:
    """Raises where it breaks the packaging standards."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Metadata.from_email(archive.read(name))


# What is in it


def test_the_wheel_holds_all_of_the_packages_and_nothing_else(wheel: Path) -> None:
    expected = {
        f"{package}/{path.relative_to(ROOT / folder)}"
        for folder, package in PACKAGES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}

    assert held == expected
    assert {Path(name).suffix for name in held} >= {".py", ".pyi", ".typed", ".sql", ".js", ".css", ".svg", ".html", ".mako"}


def test_the_wheel_says_what_it_is(wheel: Path, metadata: Metadata) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
        assert archive.read(licence) == (ROOT / "LICENSE").read_bytes()

    assert metadata.description_content_type == "text/markdown"
    assert metadata.description == (ROOT / "README.md").read_text()
    assert metadata.license_expression == "Apache-2.0"


def test_the_same_source_gives_the_same_bytes_whenever_and_wherever(source: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", source, tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    for path in unpacked.rglob("*"):
        os.utime(path, (0, 0))

    assert build("wheel", unpacked, tmp_path / "dist").read_bytes() == wheel.read_bytes()


# What it needs


@pytest.mark.parametrize("extra", ROOMS)
def test_what_a_program_imports_is_what_its_extra_names(extra: str) -> None:
    """And not what happens to come along with it: that may stay away with its next version."""
    modules = [*of(ROOMS[extra]), *set().union(*map(reached, of(ROOMS[extra])))]
    imported = packages(set(modules)) - set(OURS) - sys.stdlib_module_names
    named = {canonicalize_name(Requirement(line).name) for line in requires(extra)}
    brought_by = {package: set(map(canonicalize_name, found)) for package, found in packages_distributions().items()}

    assert {package for package in imported if not brought_by[package] & named} == set()
    assert named - NEVER_IMPORTED - set().union(*(brought_by[package] for package in imported)) == set()


def requires(extra: str) -> list[str]:
    return [*pins.PROJECT["dependencies"], *pins.PROJECT["optional-dependencies"][extra]]


@dataclass(frozen=True)
class Environment:
    """Python's own library, the wheel, and what its metadata say that some extras need: nothing else can be imported."""

    folder: Path
    wheel: Path
    requires: Collection[str]

    def install(self, *extras: str) -> None:
        """What is needed lies where the tests run: no package index is asked for it."""
        venv.create(self.folder, symlinks=True)
        (installed,) = self.folder.glob("lib/python*/site-packages")
        for distribution in pins.closure(self.requires, extras).values():
            for file in distribution.files or []:
                if ".." not in file.parts and not (installed / file).exists():
                    (installed / file).parent.mkdir(parents=True, exist_ok=True)
                    (installed / file).symlink_to(Path(str(distribution.locate_file(file))))
        pip = [sys.executable, "-m", "pip", "--python", str(self.folder / "bin/python")]
        subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(self.wheel)], check=True)

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    def run(self, name: str, *arguments: str, status: int = 0, **environment: str) -> str:
        command, environment = [self.program(name), *arguments], {**os.environ, **environment}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
        assert done.returncode == status
        return done.stdout


@pytest.fixture(scope="module")
def bare(wheel: Path, metadata: Metadata, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel without any extra."""
    environment = Environment(
        tmp_path_factory.mktemp("bare") / "venv", wheel, [str(one) for one in metadata.requires_dist or []]
    )
    environment.install()
    return environment


@pytest.fixture
def environment(wheel: Path, metadata: Metadata, short_dir: Path) -> Environment:
    return Environment(short_dir / "venv", wheel, [str(one) for one in metadata.requires_dist or []])


@pytest.mark.parametrize(
    ("program", "extra"), [("gpu-guest-agent", "agent"), ("gpu-host-proxy", "proxy"), ("gpu-aggregator", "aggregator")]
)
def test_without_its_extra_a_program_names_it_in_one_line(program: str, extra: str, bare: Environment) -> None:
    done = subprocess.run([bare.program(program), "--version"], capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(rf"error: \w+ is not installed; run: pip install 'cvm-gpu-telemetry\[{extra}\]'\n", done.stderr), (
        done.stderr
    )


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as reply:
        text: str = reply.read().decode()
    return text


def test_the_agent_runs_from_its_extra_alone(environment: Environment, tmp_path: Path) -> None:
    environment.install("agent")
    (tmp_path / "nvml.txt").write_text("devices = 2\n")
    (tmp_path / "app-compose.json").write_text('{"public_sysinfo": true}')
    card = {"LD_LIBRARY_PATH": str(build_fake_nvml(tmp_path)), "FAKE_NVML_FILE": str(tmp_path / "nvml.txt")}
    guest, external = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    flags = ["--guest-api", guest, "--external", external, "--app-compose", f"{tmp_path}/app-compose.json"]

    assert len(json.loads(environment.run("gpu-guest-agent", "gpu-info", **card))["gpus"]) == 2
    with running(environment.program("gpu-guest-agent"), flags, tmp_path / "log"):
        assert "version" in json.loads(fetch(f"http://{guest}/api/Info?json"))
        assert "<html" in fetch(f"http://{external}/")
        assert "# HELP" in fetch(f"http://{external}/metrics")


def test_the_proxy_runs_from_its_extra_alone(environment: Environment, short_dir: Path) -> None:
    environment.install("proxy")
    (short_dir / "vms.toml").write_text(f'[[vm]]\nid = "vm-1"\nguest = "unix:{short_dir}/agent.sock"\n')
    listen, vms = f"127.0.0.1:{free_port()}", ["--vms", f"{short_dir}/vms.toml"]
    flags = ["--listen", listen, "--grpc", f"unix:{short_dir}/grpc.sock", *vms]

    assert "vm-1" in environment.run("gpu-host-proxy", "vms", *vms, status=1), "its agent is away"
    with running(environment.program("gpu-host-proxy"), flags, short_dir / "log"):
        assert "vm-1" in fetch(f"http://{listen}/prpc/Status?json")
        assert "# HELP" in fetch(f"http://{listen}/metrics")
        assert "# HELP" in fetch(f"http://{listen}/guest-metrics?id=vm-1")


def test_the_aggregator_runs_from_its_extra_alone_and_speaks_to_postgresql_with_the_other(
    environment: Environment, tmp_path: Path, postgres_url: str
) -> None:
    environment.install("aggregator")
    listen, database = f"127.0.0.1:{free_port()}", ["--db", f"sqlite:///{tmp_path}/history.db"]
    flags = ["--listen", listen, "--vmm", f"unix:{tmp_path}/none.sock", *database]

    assert "has schema" in environment.run("gpu-aggregator", "db", "upgrade", *database)
    assert "utilization" in environment.run("gpu-aggregator", "report", "--list")
    # As in a slim image, where the system has no time zones.
    with running(environment.program("gpu-aggregator"), flags, tmp_path / "log", {**os.environ, "PYTHONTZPATH": ""}):
        assert fetch(f"http://{listen}/readyz") == "ready\n"
        files = re.findall(r'(?:href|src)="(static/[^"]+)"', fetch(f"http://{listen}/"))
        assert {path.rpartition(".")[2] for path in files} >= {"css", "js", "svg"}
        assert all(fetch(f"http://{listen}/{path}") for path in files)
        assert "# HELP" in fetch(f"http://{listen}/metrics")
        assert json.loads(fetch(f"http://{listen}/openapi.json"))["paths"]
        assert json.loads(fetch(f"http://{listen}/api/v1/reports/utilization?time_zone=Europe/Berlin"))["rows"] == []

    environment.install("postgres")
    assert "has schema" in environment.run("gpu-aggregator", "db", "upgrade", "--db", postgres_url)
    # Not with the system's libpq, which a slim image has not.
    assert environment.run("python", "-c", "import psycopg; print(psycopg.pq.__impl__)") == "binary\n"


# The agent's pins


def test_the_agents_pins_are_what_it_needs_in_the_versions_that_the_tests_run_with() -> None:
    """`make` keeps to the pins when it sets up; `make pins` moves them."""
    assert {f"{name}=={found.version}" for name, found in pins.agent_closure().items()} == set(pins.pinned_hashes())


def test_every_pin_names_its_files_and_they_are_those_of_the_sbom() -> None:
    bom = json.loads(pins.SBOM.read_text())
    in_sbom = {f"{c['name']}=={c['version']}": {f["hashes"][0]["content"] for f in c["components"]} for c in bom["components"]}

    assert all(pins.pinned_hashes().values())
    assert pins.pinned_hashes() == in_sbom


def test_pins_and_sbom_are_as_they_are_made() -> None:
    made = pins.pins(pins.sbom_files(json.loads(pins.SBOM.read_text())))

    assert pins.REQUIREMENTS.read_text() == pins.requirements_text(made), "run `make pins` and look at the diff"
    assert pins.SBOM.read_text() == pins.sbom_text(made), "run `make pins` and look at the diff"


def test_every_python_and_processor_has_a_wheel_of_each_pin() -> None:
    for name, files in pins.sbom_files(json.loads(pins.SBOM.read_text())).items():
        tags = [wheel.removesuffix(".whl").split("-")[2:] for wheel in files]
        for processor in pins.PROCESSORS:
            for python in (f"cp{version.replace('.', '')}" for version in pins.PYTHONS):
                assert any(
                    (python in tag[0] or tag[1] in ("abi3", "none")) and (processor in tag[2] or tag[2] == "any")
                    for tag in tags
                ), f"{name}: {python} {processor}"
