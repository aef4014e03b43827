"""The floor plan: who may import whom.

    guest_agent | host_proxy | aggregator  ->  gpuwire  ->  libraries

Down, never sideways. `import` statements are read from the source, those inside functions too; what stands under
`if TYPE_CHECKING:` is for type checkers and does not count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("guest_agent", "host_proxy", "aggregator")
OURS = (*SERVICES, "gpuwire")

# Everything else in gpuwire takes values and returns values.
EDGES = {"gpuwire.access", "gpuwire.entry", "gpuwire.listener", "gpuwire.transport", "gpuwire.service", "gpuwire.http_client"}
EDGE_LIBRARIES = {"aiohttp", "asyncio", "click", "httptools", "selectors", "signal", "socket", "ssl", "subprocess", "threading"}

# Importing ctypes has imported os already: it costs a sample nothing.
COLLECTOR_IMPORTS = {"__future__", "ctypes", "os", "sys"}

# These name a source of facts there, which is no call.
NVML_CITED = {"gpuwire.bdf", "gpuwire.device"}
NVML_SYMBOL = re.compile(r"\bnvml[A-Z]\w+|libnvidia-ml")


@cache
def modules() -> dict[str, Path]:
    """Every module of ours by its full name; migrations by the name that they are installed under."""
    found = {}
    for package, folder in [*((name, name) for name in OURS), ("aggregator._migrations", "migrations")]:
        for path in (ROOT / folder).rglob("*.py"):
            parts = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def imported(name: str, *, at_top: bool = False) -> set[str]:
    """The modules that `name` imports itself, or only those that importing it loads."""
    found = set()
    for node in _statements(ast.parse(modules()[name].read_text()), at_top):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import; write the full name"
            assert node.module is not None
            found.add(node.module)
            # `from package import module` imports the module too.
            found |= {full for alias in node.names if (full := f"{node.module}.{alias.name}") in modules()}
    return found


def _statements(node: ast.AST, at_top: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        if at_top and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        yield child
        yield from _statements(child, at_top)


def reached(name: str) -> set[str]:
    """All that `name` imports by itself and through modules of ours."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        for found in imported(todo.pop()):
            # Importing a.b.c runs a and a.b first.
            parents = [found.rpartition(".")[0]] if found in modules() and "." in found else []
            for module in [found, *parents]:
                if module not in seen:
                    seen.add(module)
                    todo += [module] if module in modules() else []
    return seen


def packages(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def of(package: str) -> list[str]:
    return sorted(name for name in modules() if name == package or name.startswith(f"{package}."))


def test_the_walk_sees_the_house() -> None:
    assert {name.partition(".")[0] for name in modules()} == set(OURS)
    assert "gpuwire.bdf" in imported("gpuwire.placement")
    assert "gpuwire.service" in imported("guest_agent.app"), "from package import module"
    assert {"gpuwire.jsonshape", "json", "google.protobuf.message"} <= reached("host_proxy.passthrough")


@pytest.mark.parametrize("name", [name for package in SERVICES for name in of(package)])
def test_services_import_gpuwire_and_libraries_never_one_another(name: str) -> None:
    own = name.partition(".")[0]
    assert packages(imported(name)) & set(SERVICES) <= {own}


@pytest.mark.parametrize("name", of("gpuwire"))
def test_gpuwire_imports_no_service(name: str) -> None:
    assert not packages(imported(name)) & set(SERVICES)


@pytest.mark.parametrize("name", [name for name in of("gpuwire") if name not in EDGES])
def test_gpuwire_is_pure_but_for_its_edges(name: str) -> None:
    assert not packages(imported(name)) & EDGE_LIBRARIES
    assert not imported(name) & EDGES


def test_edges_are_where_the_floor_plan_says() -> None:
    assert set(modules()) >= EDGES


# The guest agent: what is imported there is in the measured image.


def test_the_collector_loads_no_more_than_ctypes() -> None:
    assert imported("guest_agent.collector", at_top=True) <= COLLECTOR_IMPORTS
    assert not packages(reached("guest_agent.collector")) & set(OURS)


@pytest.mark.parametrize("name", [name for name in modules() if name != "guest_agent.collector"])
def test_only_the_collector_touches_nvml(name: str) -> None:
    assert not packages(imported(name)) & {"ctypes", "pynvml"}
    if name not in NVML_CITED:
        assert not NVML_SYMBOL.findall(modules()[name].read_text())


@pytest.mark.parametrize("name", of("guest_agent"))
def test_the_guest_carries_no_http_client(name: str) -> None:
    assert not reached(name) & {"httptools", "gpuwire.http_client", "httpx", "requests"}


# The host proxy: what it cannot decode it cannot re-encode.


def test_the_pass_through_knows_no_guest_message() -> None:
    loaded = reached("host_proxy.passthrough")
    assert "gpuwire.http_client" in loaded
    assert not loaded & {"gpuwire.codec", "gpuwire.device", "gpuwire.pb.guest_api_pb2"}


# The aggregator: the only room with a database.


@pytest.mark.parametrize("name", [name for package in ("gpuwire", "guest_agent", "host_proxy") for name in of(package)])
def test_only_the_aggregator_knows_a_database(name: str) -> None:
    assert not packages(imported(name)) & {"alembic", "psycopg", "sqlalchemy", "sqlite3"}


# The contract's folder is text.


@pytest.mark.parametrize("name", list(modules()))
def test_nobody_imports_proto(name: str) -> None:
    assert not packages(imported(name)) & {"proto"}


def test_the_contract_is_a_folder_of_text() -> None:
    assert not list((ROOT / "proto").rglob("*.py"))
