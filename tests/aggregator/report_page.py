"""docs/reports.md: each report as its file describes it, with the table that the command prints of a fleet that is known."""

from __future__ import annotations

import tempfile
from contextlib import closing
from pathlib import Path

from multidict import MultiDict

from aggregator.database import Reading
from aggregator.parameters import read_parameters
from aggregator.reports import Report, reports, run_report
from aggregator.reports.display import WIDTH, as_table
from aggregator.store import Store
from gpuwire.access import EVERYTHING
from tests.aggregator.story import END_MS, tell

INTRODUCTION = """\
# Reports

Made from the code by `make golden`; the tables are what the command prints of a fleet of six cards over 38 hours.

```sh
gpu-aggregator report --list
gpu-aggregator report idle --db sqlite:///gpu-history.db
gpu-aggregator report utilization --since 7d --where by=day --time-zone Europe/Berlin
gpu-aggregator report placement --since 30d --where host_bdf=19:00.0 --where vmm=rack1 --format csv
gpu-aggregator report occupancy --since 2026-11-01T00:00:00Z --until 2026-12-01T00:00:00Z --format json
gpu-aggregator report energy --where by=app --sql | psql gpu_history
```

`--since` is a duration before `--until`, or a time; 24 hours when left out. A number alone is Unix seconds, from the
year 2000 on: 24 is refused, 24h is meant. Rows are of whole buckets: the range is
widened to 5 minutes, to an hour where finer ones are no longer kept, to days with `by=day`. The second line says what
was asked, what the rows are made of, and up to when there is data. `--where` names a `uuid`, `bdf`, `host_bdf`, `vmm`,
`vm_id` or `app_id`, exactly, and what a report is asked beside. `--sql` prints the statement with all its values, for
psql or sqlite3. A read-only role is enough ([operations.md](operations.md#roles-on-postgresql)). Over HTTP:
[api.md](api.md#reports).

Time is real time. A sample speaks for the time since the one before it in its stay, at most until a card without news
is stale (`--stale-after`); the rest is unknown, and never taken for idle. What is empty is not known, a 0 is one. What
came late counts once it is rolled up. On a terminal a table shortens names and ids to fit 100 columns; in a pipe or a
file they are whole. Tables round figures, so that parts still add up to their sum; CSV and JSON have all of both. Rows
of one report add up to the same, whatever a row is."""

# What the tables are asked with.
_ASKED = {"utilization": [["by=gpu"], ["by=day", "time_zone=Europe/Berlin"]], "energy": [["by=app"]]}


def reports_page() -> str:
    lines = [INTRODUCTION]
    with tempfile.TemporaryDirectory() as folder, closing(Store(f"sqlite:///{folder}/{Path('h.db')}", max_lag_s=0)) as store:
        store.require_current()
        tell(store)
        with store.reading() as reading:
            for report in reports().values():
                lines += ["", f"## {report.name}", "", report.purpose, "", report.remarks, *_parameters(report)]
                for words in _ASKED.get(report.name, [[]]):
                    lines += ["", *_example(reading, report, words)]
                lines += ["", "| column | unit | |", "| --- | --- | --- |"]
                lines += [
                    f"| `{column.name}` | {column.unit} | {column.meaning}{_when(column.by)} |" for column in report.columns
                ]
    return "\n".join(lines) + "\n"


def _example(reading: Reading, report: Report, words: list[str]) -> list[str]:
    asked = read_parameters(report.model, {}, MultiDict([("since", "38h"), *(word.split("=") for word in words)]))
    flags = [
        f"--time-zone {word.removeprefix('time_zone=')}" if word.startswith("time_zone=") else f"--where {word}"
        for word in words
    ]
    command = " ".join(["gpu-aggregator report", report.name, "--since 38h", *flags])
    found = run_report(reading, report, asked, EVERYTHING, END_MS)
    return ["```text", f"$ {command}", as_table(report, found, asked.time_zone, WIDTH), "```"]


def _parameters(report: Report) -> list[str]:
    fields = report.model.model_fields
    lines = [f"- `{name}={fields[name].default}`: {fields[name].description}" for name in report.parameters]
    return ["", *lines] if lines else []


def _when(by: tuple[str, ...]) -> str:
    return f" With by={', '.join(by)} only." if by else ""
