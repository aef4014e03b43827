"""House rules that no linter knows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for folder in ("gpuwire", "guest_agent", "host_proxy", "aggregator") for path in (ROOT / folder).rglob("*.py")]
OWN = [path for path in SOURCES if "_pb2" not in path.name]
TESTS = list((ROOT / "tests").rglob("*.py"))

UNFINISHED_WORDS = {"common", "helper", "helpers", "manager", "managers", "misc", "util", "utils"}
LOG_METHODS = {"critical", "debug", "error", "exception", "info", "warning"}

# Where a process may end itself: the command lines, what runs them, and the collector, which is a program by itself.
PROGRAMS = {"gpuwire/service.py", "guest_agent/collector.py"}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", [path for path in OWN if path.stat().st_size], ids=name_of)
def test_a_module_opens_with_what_belongs_in_it(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert [name_of(path) for path in [*SOURCES, *TESTS] if set(path.stem.split("_")) & UNFINISHED_WORDS] == []


def test_every_tests_folder_is_a_package() -> None:
    """Else tests/guest_agent would shadow guest_agent."""
    assert {name_of(path.parent) for path in TESTS if not (path.parent / "__init__.py").is_file()} == set()


@pytest.mark.parametrize("path", OWN, ids=name_of)
def test_a_log_line_is_a_lower_case_event_then_key_and_value_filled_in_lazily(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOG_METHODS):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "log"):
            continue
        event = node.args[0]
        assert isinstance(event, ast.Constant), f"line {node.lineno}: not one constant text"
        assert isinstance(event.value, str)
        assert event.value[0].islower(), f"line {node.lineno}: {event.value!r}"


@pytest.mark.parametrize("path", [path for path in OWN if path.name != "__main__.py"], ids=name_of)
def test_only_programs_end_the_process(path: Path) -> None:
    if name_of(path) in PROGRAMS:
        return
    code = ast.parse(path.read_text())
    ended = [n.lineno for n in ast.walk(code) if isinstance(n, ast.Attribute) and ast.unparse(n) in ("sys.exit", "os._exit")]
    ended += [n.lineno for n in ast.walk(code) if isinstance(n, ast.Name) and n.id in ("SystemExit", "exit", "quit")]
    assert ended == []
