"""docs/troubleshooting.md has an entry for every word and message that an operator or a client may see, and none for what no
program says; docs/security.md names for each claim a test that is there.

An entry is what stands as code in a heading or in the first cell of a table row; `...` in it is what differs from time to time.
What the programs say is read from their source: the words of error classes, what exceptions and log lines are made of, and what
the functions in SAYING return."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import socket
import sqlite3
import tomllib
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from itertools import product
from pathlib import Path

import click
import pytest
from psycopg import _conninfo_attempts

from aggregator import outcome
from aggregator.__main__ import cli as aggregator_cli
from aggregator.__main__ import poll_and_store
from aggregator.app import html_response
from aggregator.parameters import STATES
from aggregator.rows import Cvm, Poll
from aggregator.settings import PollSettings, Vmm
from aggregator.spool import Spool
from gpuwire.address import UnixAddress
from gpuwire.device import GpuSnapshot
from gpuwire.schema import CURRENT, Policy, Schema, Unversioned, judge
from host_proxy.__main__ import cli as proxy_cli
from tests.fakes.vmm import FakeVmm, Guest, body_of, running_vm
from tests.processes import free_port

ROOT = Path(__file__).parents[2]
TROUBLESHOOTING = ROOT / "docs/troubleshooting.md"
SECURITY = ROOT / "docs/security.md"
SOURCES = [
    path
    for room in ("gpuwire", "guest_agent", "host_proxy", "aggregator")
    for path in sorted((ROOT / room).rglob("*.py"))
    if "_pb2" not in path.name
]

MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in SOURCES}

# Classes whose first argument is a message, beside all that are called ...Error or have a word; and where that argument is.
MESSAGE_AT = {"fail": 0, "BadParameter": 0, "CollectorRun": 2, "Verdict": 1}
# Functions whose texts, returned or yielded, are messages.
SAYING = {
    "aggregator/catalogue.py": {"__str__"},
    "aggregator/check.py": {"_of_the_schema", "_of_the_file", "_of_the_history"},
    "aggregator/parameters.py": {"_problem"},
    "aggregator/poller.py": {"_no_id", "_lost"},
    "gpuwire/transport.py": {"reason"},
    "guest_agent/collector_process.py": {"_read_until_exit", "_status_failure"},
}
# Variables that hold a message, or the part of one that says why.
WHY = {"cause", "conflict", "conflicts", "failure", "problem", "reason", "step"}
# What is wrong there is in the log at debug only.
UNSEEN = {"host_proxy/qmp.py"}
LEVELS = {"warning", "error", "critical", "exception", "log"}
LEAST_LETTERS = 5
TOKEN, COMPOSE = "a-token-of-the-vmm", b"services: {app: {image: secret}}"

HEADING = re.compile(r"#{2,4} (.*)")
# What is not said by us is not in our source: its entries are held against the libraries themselves.
LIBRARIES = re.compile(r"^### From the libraries$.*?(?=^##)", re.MULTILINE | re.DOTALL)


# What the document has


@cache
def entries() -> tuple[str, ...]:
    """In the order of the document. The first section, which says where to go, has none; those of libraries are left out."""
    sections = LIBRARIES.sub("", TROUBLESHOOTING.read_text()).split("\n## ")[2:]
    return tuple(entry for section in sections for entry in entries_of("## " + section))


def entries_of(text: str) -> Iterator[str]:
    for line in text.splitlines():
        heading = HEADING.fullmatch(line)
        cell = heading[1] if heading else re.split(r"(?<!\\)\|", line)[1] if line.startswith("|") else ""
        yield from re.findall(r"`([^`]+)`", cell.replace("\\|", "|"))


def covers(entry: str, message: str) -> bool:
    """Whether a message begins as the entry says; or the entry is one of its forms, with something in place of `...`."""
    return pattern(entry).match(message) is not None or pattern(message).fullmatch(entry) is not None


@cache
def pattern(said: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, said.split("..."))), re.DOTALL)


def letters(message: str) -> int:
    return sum(map(str.isalpha, message))


# What the programs say


@cache
def words() -> dict[str, str]:
    """Each with where it comes from."""
    found = dict.fromkeys(error_words(), "a word of an error")
    found |= dict.fromkeys(
        [*outcome.ANSWERED, outcome.VMM_UNREACHABLE, *error_words(ROOT / "aggregator/outcome.py")], "an outcome"
    )
    found |= dict.fromkeys(STATES, "a card's state")
    found |= dict.fromkeys(words_of_polls_table(), "a word of poll's table")
    found |= dict.fromkeys(schema_statuses(), "a schema status")
    found |= dict.fromkeys(database_kinds(), "what keeps a database away")
    rules = (ROOT / "deploy/prometheus/gpu-fleet.rules.yml").read_text()
    found |= dict.fromkeys(re.findall(r"- alert: (\w+)", rules), "an alert")
    return found


def error_words(users: Path | None = None) -> set[str]:
    """Of every error class; or of those whose word this module uses."""
    classes = {
        node.name: statement.value.value
        for node in nodes()
        if isinstance(node, ast.ClassDef)
        for statement in node.body
        if isinstance(statement, ast.Assign) and name_of(statement.targets[0]) == "word"
        if isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
    }
    if users is None:
        return set(classes.values())
    used = {node.value.id for node in ast.walk(parsed(users)) if isinstance(node, ast.Attribute) and node.attr == "word"
            if isinstance(node.value, ast.Name)}  # fmt: skip
    return {classes[name] for name in used & classes.keys()}


def words_of_polls_table() -> set[str]:
    """Those that stand where an outcome does and are none."""
    tables = (node for node in nodes() if isinstance(node, ast.FunctionDef) and node.name == "poll_table")
    constants = {node.value for table in tables for node in ast.walk(table) if isinstance(node, ast.Constant)}
    return {word for word in constants if isinstance(word, str) and re.fullmatch("[a-z_]+", word)}


def schema_statuses() -> set[str]:
    other = [Schema(CURRENT.version + step, "0" * 16) for step in (-1, 0, 1)]
    named = [None, "no schema", str(CURRENT), *map(str, other)]
    return {judge(*asked).status for asked in product(named, Policy, Unversioned)}


def database_kinds() -> set[str]:
    """Those that an error of a database may have, and those of a step of looking after the history."""
    named = [
        (name_of(node.targets[0]), node.value)
        for node in nodes()
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    ]
    kinds = [part for name, mapping in named if name.endswith("_KINDS") for part in mapping.values]
    to_do = [part for name, mapping in named if name == "_WHAT_TO_DO" for part in mapping.keys]
    return {str(part.value) for part in (*kinds, *to_do) if isinstance(part, ast.Constant)}


def nodes() -> Iterator[ast.AST]:
    for path in SOURCES:
        yield from ast.walk(parsed(path))


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def messages(module: ast.Module, name: str) -> Iterator[tuple[int, str]]:
    """The lines where something is said, and what: with `...` for what is filled in. Log lines without their values."""
    constants = constants_of(module)
    for node in ast.walk(module):
        for said in says(node, SAYING.get(name, set())):
            for message in texts(said, constants):
                yield said.lineno, re.split(r": (?:\w+=)?%", message)[0]


def says(node: ast.AST, saying: set[str]) -> Iterator[ast.expr]:
    """The expressions of messages that stand in this node itself."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="log"), attr=level)) if level in LEVELS:
            yield node.args[1 if level == "log" else 0]
        case ast.Call(func=ast.Attribute(value=ast.Name(id="errors"), attr="append"), args=[message]):
            yield message
        case ast.Call():
            called = name_of(node.func)
            at = MESSAGE_AT.get(called, 0 if called.endswith("Error") or called in error_classes() else None)
            if at is not None and len(node.args) > at:
                yield node.args[at]
            yield from (keyword.value for keyword in node.keywords if keyword.arg in ("conflict", "error"))
        case ast.Assign(targets=[ast.Name(id=variable) | ast.Attribute(attr=variable)]) if variable in WHY:
            yield node.value
        case ast.FunctionDef(name=function) if function in saying:
            yield from (
                inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return | ast.Yield) and inner.value is not None
            )


def name_of(called: ast.expr) -> str:
    match called:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


@cache
def error_classes() -> set[str]:
    return {
        node.name
        for node in nodes()
        if isinstance(node, ast.ClassDef) and any(name_of(base) in ("TelemetryError", "Exception") for base in node.bases)
    }


def texts(node: ast.expr, constants: dict[str, ast.expr]) -> Iterator[str]:
    match node:
        case ast.Constant(value=str() as value):
            yield value
        case ast.JoinedStr():
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from (f"{a}{b}" for a, b in product(texts(left, constants), texts(right, constants)))
        case ast.IfExp():
            yield from (*texts(node.body, constants), *texts(node.orelse, constants))
        case ast.DictComp():
            yield from texts(node.value, constants)
        case ast.BoolOp():
            yield from (found for value in node.values for found in texts(value, constants))
        case ast.Name(id=name) if name in constants:
            yield from texts(constants[name], {})
        case _:
            yield "..."


def constants_of(module: ast.Module) -> dict[str, ast.expr]:
    """The texts that have a name in it: its own, and those that it imports from our modules."""
    found = own_constants(module)
    for node in module.body:
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            theirs = own_constants(parsed(MODULES[node.module]))
            found |= {alias.name: theirs[alias.name] for alias in node.names if alias.name in theirs}
    return found


def own_constants(module: ast.Module) -> dict[str, ast.expr]:
    return {
        name_of(node.targets[0]): node.value
        for node in module.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }


def said_by_the_programs() -> Iterator[tuple[str, str]]:
    """Where and what; without what is all filled in, for which the part that is filled in has its entry."""
    for path in SOURCES:
        name = str(path.relative_to(ROOT))
        if name in UNSEEN:
            continue
        for line, message in messages(parsed(path), name):
            if letters(message) >= LEAST_LETTERS:
                yield f"{name}:{line}", message
    page = (ROOT / "aggregator/static/app.js").read_text()
    for message in re.findall(r"""(?:say|signIn)\([^"`\n]*?["`]([^"`]+)["`]""", page):
        yield "aggregator/static/app.js", re.sub(r"\$\{.*?\}", "...", message)


# The tests


@pytest.mark.parametrize("word", sorted(words()))
def test_every_word_has_an_entry(word: str) -> None:
    assert any(entry == word for entry in entries()), f"docs/troubleshooting.md has no `{word}`, {words()[word]}"


def test_every_message_has_an_entry() -> None:
    missing = [f"{where}: {message}" for where, message in said_by_the_programs() if not has_entry(message)]
    assert missing == [], "docs/troubleshooting.md says nothing of these"


def has_entry(message: str) -> bool:
    return any(covers(entry, message) for entry in entries() if entry not in words())


def test_nothing_has_an_entry_that_no_program_says() -> None:
    said = {message for _, message in said_by_the_programs()}
    unsaid = [entry for entry in entries() if entry not in words() and not any(covers(entry, message) for message in said)]
    assert unsaid == []


def test_no_entry_is_so_general_that_it_hides_what_is_new() -> None:
    assert [entry for entry in entries() if entry not in words() and letters(entry) < LEAST_LETTERS] == []


@pytest.mark.parametrize(
    "source",
    [
        'raise StartError(f"spool {folder} is on fire")',
        'raise DatabaseAway("the moon is in the wrong house")',
        'log.warning("card melts: gpu=%s", uuid)',
        'log.log(level, "card melts: gpu=%s", uuid)',
        'self.fail(f"{value!r} smells", param, ctx)',
        'reason = "the cable was bitten by a rat" if bitten else error.strerror',
        'return CollectorRun(b"", b"", "the GPU collector sings")',
        'snapshot = GpuSnapshot(error="NVML went on holiday")',
        'errors.append(f"{query}: NVML whispers")',
    ],
)
def test_a_message_that_is_new_is_missed(source: str) -> None:
    """That what is looked for is found: else the tests above would be content with nothing."""
    found = [message for _, message in messages(ast.parse(source), "") if letters(message)]
    assert found
    assert not any(map(has_entry, found))


def test_what_is_looked_at_is_there() -> None:
    assert {"shutdown_failed", "database", "timeout"} <= error_words()
    assert {"disk_full", "locked", "refused"} <= database_kinds()
    assert words_of_polls_table() == {"unaskable"}
    assert schema_statuses() == {"match", "older", "newer", "drift", "unversioned", "unchecked"}
    for file, functions in SAYING.items():
        assert functions <= {node.name for node in ast.walk(parsed(ROOT / file)) if isinstance(node, ast.FunctionDef)}, file


# What libraries say, where a user of ours sees it


def test_the_words_of_libraries_are_as_they_say_them(tmp_path: Path) -> None:
    section = LIBRARIES.search(TROUBLESHOOTING.read_text())
    entries = list(entries_of(section[0])) if section else []
    said = [failure_of(fail, tmp_path) for fail in LIBRARY_FAILURES]

    assert [entry for entry in entries if not any(pattern(entry).search(words) for words in said)] == []
    assert [words for words in said if not any(pattern(entry).search(words) for entry in entries)] == []


def failure_of(fail: Callable[[Path], object], folder: Path) -> str:
    with pytest.raises((click.ClickException, ValueError, OSError, sqlite3.Error)) as raised:
        fail(folder)
    error = raised.value
    return error.format_message() if isinstance(error, click.ClickException) else str(error)


def write_readonly(folder: Path) -> None:
    file = folder / "history.db"
    with closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE gpu (uuid)")
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        database.execute("INSERT INTO gpu VALUES (1)")


def open_missing(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "none/history.db")):
        pass


def resolve_by_psycopg(_: Path) -> None:
    """Its source, for to fail it would ask a name server."""
    raise OSError(inspect.getsource(_conninfo_attempts))


LIBRARY_FAILURES: list[Callable[[Path], object]] = [
    lambda _: aggregator_cli(["serve", "--none"], standalone_mode=False),
    lambda folder: proxy_cli(["serve", "--config", f"{folder}/none.toml"], standalone_mode=False),
    lambda _: tomllib.loads("listen = "),
    lambda _: tomllib.loads("listen"),
    open_missing,
    write_readonly,
    resolve_by_psycopg,
    lambda _: socket.getaddrinfo("host-1", 1, flags=socket.AI_NUMERICHOST),
    lambda _: asyncio.run(asyncio.open_connection("127.0.0.1", free_port())),
]


# docs/security.md


def test_the_tests_that_it_names_are_there() -> None:
    there = {name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    named = re.findall(r"`(test_\w+)`", SECURITY.read_text())
    assert len(named) > 50
    assert [name for name in named if name not in there] == []


def test_each_claim_names_a_test() -> None:
    tables = re.findall(r"^\| it cannot .*\n\|.*\n((?:\|.*\n)+)", SECURITY.read_text(), re.MULTILINE)
    assert len(tables) == 4
    assert [row for table in tables for row in table.splitlines() if "`test_" not in row.split("|")[3]] == []


async def test_no_secret_is_in_what_is_stored(short_dir: Path) -> None:
    vm = running_vm("vm-1", ["19:00.0"])
    compose_file = 3  # of a dstack VmConfiguration; not in our message
    vm.configuration.MergeFromString(bytes([compose_file << 3 | 2, len(COMPOSE)]) + COMPOSE)
    fleet = FakeVmm([Guest(vm, lambda: body_of(GpuSnapshot(error="no driver")))], token=TOKEN)
    settings = PollSettings(
        (Vmm("host-1", UnixAddress(f"{short_dir}/vmm.sock"), TOKEN),), 10, 64, Policy.OFF, Unversioned.ALLOW
    )
    async with fleet.serving(short_dir / "vmm.sock"):
        polled = await poll_and_store(f"sqlite:///{short_dir}/history.db", settings)
    with closing(Spool(short_dir / "spool")) as spool:
        spool.append(polled.polls)

    stored = b"".join(path.read_bytes() for path in short_dir.rglob("*") if path.is_file())
    assert stored.count(b"no driver") > 1
    assert TOKEN.encode() not in stored
    assert COMPOSE not in stored


def test_a_browser_is_told_to_run_nothing_but_our_scripts_and_to_frame_nothing() -> None:
    policy = html_response("<p>").headers["Content-Security-Policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "base-uri 'none'", "frame-ancestors 'none'"} <= set(policy)
    assert not {word for part in policy for word in part.split()[1:]} - {"'none'", "'self'"}


def test_what_waits_on_disk_is_not_for_everybody(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        with closing(Spool(tmp_path / "spool")) as spool:
            spool.append([Poll(Cvm("host-1", "vm-1", "", "", ""), 1, "unreachable", "", "")])
            modes = {path.name: path.stat().st_mode & 0o777 for path in (spool.folder, *spool.folder.iterdir())}
    finally:
        os.umask(umask)
    assert modes == {"spool": 0o750, "lock": 0o640, "0000000000000001.jsonl": 0o640}
