"""Files that are made from the code and reviewed as a diff: `make golden` rewrites them, a test compares them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import click
from sqlalchemy import create_engine, inspect, text

from aggregator.__main__ import cli as aggregator_cli
from aggregator.comments import VIEWS, column_comment
from aggregator.tables import metadata, sqlite_metadata
from aggregator.views import view_queries
from gpuwire.device import GAUGES
from gpuwire.errors import TelemetryError
from guest_agent.__main__ import cli as guest_agent_cli
from host_proxy.__main__ import cli as host_proxy_cli
from tests.aggregator.report_page import reports_page
from tests.guest_agent.pages import dashboard_page, metrics_page

ROOT = Path(__file__).parent.parent
PROGRAMS = {"gpu-guest-agent": guest_agent_cli, "gpu-host-proxy": host_proxy_cli, "gpu-aggregator": aggregator_cli}


SETTINGS = """\
Flags win over the environment, the environment over the file that `--config` names: TOML, a key for each flag with `-` written
as `_`. A flag that may be repeated (`...`) is a list there, and separated by blanks in the environment. Durations are seconds,
fractions allowed."""


def reference() -> str:
    lines = ["# Reference", "", "Made from the code by `make golden`.", ""]
    lines += [SETTINGS, ""]
    for program, cli in PROGRAMS.items():
        lines += [f"## {program}", "", first_line(cli), ""]
        for name, command in commands(cli):
            lines += [f"### {program} {name}", "", first_line(command), "", *settings(command), ""]
    lines += ["## Fields of a card", "", *fields(), ""]
    lines += ["## Errors", "", "The word stands at the head of an error's message and is a poll's outcome where one fails.", ""]
    lines += ["| word | HTTP status | says |", "| --- | --- | --- |"]
    lines += [f"| {error.word} | {error.status} | {first_line(error)} |" for error in sorted_errors()]
    lines += ["", "## SQL views", ""]
    for view, columns in view_columns().items():
        lines += [f"`{view}`: {', '.join(columns)}", ""]
    return "\n".join(lines)


def commands(group: click.Group) -> Iterator[tuple[str, click.Command]]:
    """Every command by the words that call it, those of groups within too."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", found) for inner, found in commands(command))
        else:
            yield name, command


def first_line(documented: click.Command | type) -> str:
    text = documented.help if isinstance(documented, click.Command) else documented.__doc__
    return (text or "").splitlines()[0]


def settings(command: click.Command) -> Iterator[str]:
    prefix = command.context_settings.get("auto_envvar_prefix")
    yield "| flag | environment | default | |"
    yield "| --- | --- | --- | --- |"
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            continue
        assert isinstance(parameter, click.Option)
        flag = parameter.opts[0]
        metavar = "" if parameter.is_flag else f" {parameter.make_metavar(click.Context(command))}"
        default = parameter.default if parameter.show_default else ""
        shown = ", ".join(default) if isinstance(default, (list, tuple)) else default
        repeated = " ..." if parameter.multiple else ""
        environment = f"`{prefix}_{parameter.name.upper()}`" if prefix and parameter.name else ""
        text = (parameter.help or "").replace("|", "\\|")
        yield f"| `{flag}{metavar.replace('|', chr(92) + '|')}`{repeated} | {environment} | {shown} | {text} |"


def fields() -> Iterator[str]:
    yield "| field | unit | largest sound value | NVML | |"
    yield "| --- | --- | --- | --- | --- |"
    for g in GAUGES:
        yield f"| `{g.name}` | {g.unit} | {g.upper} | `{g.source}` | {g.help} |"


def sorted_errors() -> list[type[TelemetryError]]:
    def below(kind: type[TelemetryError]) -> Iterator[type[TelemetryError]]:
        for child in kind.__subclasses__():
            yield child
            yield from below(child)

    return sorted(below(TelemetryError), key=lambda kind: (kind.status, kind.word))


def view_columns() -> dict[str, list[str]]:
    """By view, from a database that has them."""
    with create_engine("sqlite://").connect() as connection:
        metadata.create_all(connection)
        sqlite_metadata.create_all(connection)
        for view, query in view_queries("sqlite").items():
            connection.execute(text(f"CREATE VIEW {view} AS {query}"))
        columns = inspect(connection)
        return {view: [column["name"] for column in columns.get_columns(view)] for view in view_queries("sqlite")}


def views() -> str:
    lines = ["# Views", "", "Made from the code by `make golden`.", "", VIEWS_INTRODUCTION]
    for view, columns in view_columns().items():
        lines += ["", f"## {view}", "", VIEWS[view], "", "| column | |", "| --- | --- |"]
        lines += [f"| `{column}` | {column_comment(view, column)} |" for column in columns]
    return "\n".join(lines) + "\n"


VIEWS_INTRODUCTION = """\
The same names and columns on SQLite and PostgreSQL; they gain columns, they never lose or move one. Timestamps are
timestamptz on PostgreSQL and text on SQLite, UTC, `2026-11-30T14:00:00.000Z`, which sorts as time does: written so,
with milliseconds, an instant means the same to both. On PostgreSQL `\\d+ v_gpu_samples` shows these words too. What to
ask: [sql-cookbook.md](sql-cookbook.md); who may read: [operations.md](operations.md#roles-on-postgresql). `v_gpu_5m`
and `v_gpu_1h` keep a histogram of utilization that holds time, a column for each 5 %; a percentile of it is right to 5
points."""


GOLDEN: dict[Path, Callable[[], str]] = {
    ROOT / "docs/reference.md": reference,
    ROOT / "docs/reports.md": reports_page,
    ROOT / "docs/views.md": views,
    ROOT / "tests/guest_agent/golden/metrics.txt": lambda: metrics_page(""),
    ROOT / "tests/guest_agent/golden/metrics.openmetrics.txt": lambda: metrics_page("application/openmetrics-text"),
    ROOT / "tests/guest_agent/golden/dashboard.html": dashboard_page,
}


if __name__ == "__main__":
    for path, make in GOLDEN.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(make())
