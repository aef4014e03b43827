"""Reports over HTTP: what /reports and /reports/{name} can be asked, and what they answer."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, WithJsonSchema, create_model
from pydantic.fields import FieldInfo

from aggregator.answers import Answer, Text
from aggregator.database import Reading
from aggregator.errors import Forbidden, NotFound
from aggregator.parameters import Nothing, one_of, parse_text, shown
from aggregator.replies import TIME, Reply
from aggregator.reports import MAX_ROWS, Report, prepare, reports, run_report, statement_text
from aggregator.reports.display import as_csv, as_object, describe
from aggregator.reports.parameters import PARAMETERS, ReportParameters
from gpuwire.access import Scope
from gpuwire.errors import Malformed

_NAMES = list(reports())
_Name = Annotated[str, PlainValidator(parse_text), WithJsonSchema({"type": "string", "enum": _NAMES})]
MEDIA = {"json": "application/json", "csv": "text/csv", "sql": "text/plain"}
_Format = Annotated[
    str, PlainValidator(one_of(*MEDIA)), WithJsonSchema({"type": "string", "enum": list(MEDIA), "default": "json"})
]


class _Named(ReportParameters):
    name: _Name = Field(description="Which report.", examples=["idle"])
    format: _Format = Field(
        "json", description="Its rows, with what they are or as a table with commas; or the statement that finds them."
    )


def _of_some(parameter: str) -> str:
    return f" Of {', '.join(name for name, report in reports().items() if parameter in report.parameters)} only."


_OWN: dict[str, Any] = {
    name: (kind, FieldInfo.merge_field_infos(field, description=field.description + _of_some(name)))
    for name, (kind, field) in PARAMETERS.items()
}
OneReport: type[_Named] = create_model("OneReport", __base__=_Named, **_OWN)


class Column(Reply):
    name: str = Field(examples=["idle_h"])
    unit: str = Field(description="text, bdf, day, time or count; or what a number is in.", examples=["h"])
    meaning: str


class Parameter(Reply):
    name: str
    default: str | int | None
    meaning: str


class OfReport(Reply):
    name: str
    purpose: str
    remarks: str = Field(description="What its figures mean.")
    parameters: list[Parameter]
    columns: list[Column] = Field(description="All that it may have; which of them are there depends on `by`.")


class Reports(Reply):
    reports: list[OfReport]


class ReportReply(Reply):
    """Rows of a report. Figures are not rounded; absent is null."""

    report: str
    start: str = Field(description="Widened to what its rows are made of.", examples=[TIME])
    end: str = Field(description="Not included.", examples=[TIME])
    resolutions: list[Literal["1h", "5m", "raw"]] = Field(description="What its rows are made of; empty: not of samples.")
    newest: str | None = Field(description="When a card was seen last within the range.", examples=[TIME])
    columns: list[Column]
    rows: list[dict[str, str | int | float | None]] = Field(description="By the columns' names.")
    more: bool = Field(description=f"Whether there are more than these rows: at most {MAX_ROWS:,} are answered.")


def list_reports(reading: Reading, scope: Scope, asked: Nothing, now_ms: int) -> Answer:  # noqa: ARG001
    return Answer({"reports": [_describe(report) for report in reports().values()]})


def one_report(reading: Reading, scope: Scope, asked: _Named, now_ms: int) -> Answer:
    report = reports().get(asked.name)
    if report is None:
        raise NotFound(f"no report {shown(asked.name)}; there are {', '.join(reports())}")
    if wrong := sorted(asked.model_fields_set & (PARAMETERS.keys() - set(report.parameters))):
        allowed = [name for name in OneReport.model_fields if name not in PARAMETERS or name in report.parameters]
        allowed.remove("name")  # it stands in the path
        raise Malformed(f"{wrong[0]}: unknown parameter of {report.name}; allowed: {', '.join(allowed)}")
    if asked.format == "sql":
        return Answer(_statement(reading, report, asked, scope, now_ms))
    found = run_report(reading, report, asked, scope, now_ms, max_rows=MAX_ROWS)
    if asked.format == "json":
        return Answer(as_object(report, found, asked.time_zone))
    if found.more:
        # A table with commas has no place to say that it is not whole.
        raise Malformed(f"format: csv would have more than {MAX_ROWS:,} rows; allowed: a shorter range, or fewer cards or CVMs")
    return Answer(Text(MEDIA["csv"], as_csv(found, asked.time_zone) + "\n", f"{report.name}.csv"))


def _statement(reading: Reading, report: Report, asked: _Named, scope: Scope, now_ms: int) -> Text:
    """Raises Forbidden for who sees some apps only: it says of the whole fleet how far its history reaches, and runs where no
    scope holds."""
    if scope.apps is not None:
        raise Forbidden("format=sql is for who may read the whole database; json and csv are allowed")
    return Text(MEDIA["sql"], statement_text(reading, prepare(reading, report, asked, scope, now_ms)) + "\n")


def _describe(report: Report) -> dict[str, Any]:
    properties = report.model.model_json_schema()["properties"]
    parameters = [
        {
            "name": name,
            # What it is as it is written, where what it comes to is something else.
            "default": of.get("anyOf", [of])[0].get("default", of.get("default")),
            "meaning": of["description"],
        }
        for name, of in properties.items()
    ]
    return {
        "name": report.name,
        "purpose": report.purpose,
        "remarks": report.remarks,
        "parameters": parameters,
        "columns": [describe(column) for column in report.columns],
    }
