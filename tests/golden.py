"""Files that are made from the code and reviewed as a diff: `make golden` rewrites them, a test compares them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from sqlalchemy import create_engine, inspect, text

from aggregator.comments import VIEWS, column_comment
from aggregator.tables import metadata, sqlite_metadata
from aggregator.views import view_queries
from deploy.grafana import dashboards
from tests.aggregator.report_page import reports_page
from tests.guest_agent.pages import dashboard_page, metrics_page
from tests.reference import reference

ROOT = Path(__file__).parent.parent


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
    **{dashboards.file_of(uid): partial(dashboards.text_of, uid) for uid in dashboards.DASHBOARDS},
}


if __name__ == "__main__":
    for path, make in GOLDEN.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(make())
