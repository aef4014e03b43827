"""Which routes the HTTP API has, and the OpenAPI document that is made from them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from aggregator import answers, parameters, replies
from aggregator.answers import Answer
from aggregator.database import Reading
from aggregator.errors import Ambiguous, DatabaseAway, Forbidden, NotFound, QueryTooSlow
from aggregator.parameters import Parameters
from aggregator.reports import api as reports
from gpuwire.access import Scope
from gpuwire.errors import Malformed, Saturated, TelemetryError, Unauthorized

PREFIX = "/api/v1"
OPENAPI = "/openapi.json"
# What any route may answer.
ERRORS: tuple[type[TelemetryError], ...] = (Malformed, Unauthorized, Forbidden, Saturated, DatabaseAway, QueryTooSlow)


@dataclass(frozen=True, slots=True)
class Route:
    """One route. `path` names its path parameters as the model's fields; the rest of these are the query's. `answer` gets one
    reading of the database, what the caller may see, the parameters and now, and raises what stands in `errors`. `media` is
    what it may answer in: `reply` is the shape of those that are JSON."""

    path: str
    summary: str
    parameters: type[Parameters]
    reply: type[BaseModel]
    answer: Callable[[Reading, Scope, Any, int], Answer] | None
    errors: tuple[type[TelemetryError], ...] = ()
    media: tuple[str, ...] = ("application/json",)


ROUTES: tuple[Route, ...] = (
    Route("/gpus", "Every card with its latest sample, by uuid.", parameters.Gpus, replies.GpuPage, answers.gpus),
    Route(
        "/gpus/{uuid}",
        "One card: its latest sample and its stays in CVMs.",
        parameters.OneGpu,
        replies.GpuDetail,
        answers.one_gpu,
        (NotFound,),
    ),
    Route(
        "/gpus/{uuid}/history",
        "History of one card, in buckets.",
        parameters.GpuHistory,
        replies.History,
        answers.gpu_history,
        (NotFound,),
    ),
    Route(
        "/history",
        "History of one place, in buckets: a slot of a host, or of a CVM, whichever cards sat there.",
        parameters.PlaceHistory,
        replies.History,
        answers.place_history,
        (NotFound, Ambiguous),
    ),
    Route(
        "/cvms",
        "Every CVM with the outcome of its last poll, by VMM and id.",
        parameters.Cvms,
        replies.CvmPage,
        answers.cvms,
    ),
    Route(
        "/cvms/{vm_id}",
        "One CVM: its cards, and what its polls came to.",
        parameters.OneCvm,
        replies.CvmDetail,
        answers.one_cvm,
        (NotFound, Ambiguous),
    ),
    Route("/summary", "The fleet in figures.", parameters.Summary, replies.Summary, answers.summary),
    Route(
        "/heatmap",
        "Every card as it is now, with its utilization over a time, by VMM and CVM.",
        parameters.Heatmap,
        replies.Heatmap,
        answers.heatmap,
    ),
    Route("/reports", "Which reports there are.", parameters.Nothing, reports.Reports, reports.list_reports),
    Route(
        "/reports/{name}",
        "Answers of a report, as those of the command.",
        reports.OneReport,
        reports.ReportReply,
        reports.one_report,
        (NotFound,),
        media=tuple(reports.MEDIA.values()),
    ),
)

# Not one answer but a stream, of rows rather than of JSON: api.py serves it by itself.
EXPORT = Route(
    "/export",
    "Samples: rows of v_gpu_samples, by card, then by time.",
    parameters.Export,
    replies.Sample,
    None,
    media=("text/csv", "application/x-ndjson"),
)


def openapi(routes: Sequence[Route]) -> dict[str, Any]:
    """OpenAPI 3.1, from the routes' models."""
    models: list[type[BaseModel]] = [*dict.fromkeys(route.reply for route in (*routes, EXPORT)), replies.Problem]
    refs, schemas = models_json_schema(
        [(model, "serialization") for model in models], ref_template="#/components/schemas/{model}"
    )
    paths = {}
    for route in (*routes, EXPORT):
        schema = refs[route.reply, "serialization"]
        content = {media: {"schema": schema if "json" in media else {"type": "string"}} for media in route.media}
        problem = {"application/problem+json": {"schema": refs[replies.Problem, "serialization"]}}
        responses = {"200": {"description": "The answer.", "content": content}}
        for status in sorted({error.status for error in (*ERRORS, *route.errors)}):
            codes = [error.word for error in (*ERRORS, *route.errors) if error.status == status]
            responses[str(status)] = {
                "description": f"{HTTPStatus(status).phrase}: code {' or '.join(codes)}.",
                "content": problem,
            }
        operation = {
            "operationId": route.path.strip("/").replace("/", "_").replace("{", "").replace("}", ""),
            "summary": route.summary,
            "parameters": _parameters(route),
            "responses": responses,
        }
        paths[PREFIX + route.path] = {"get": operation}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "GPU telemetry of confidential VMs",
            "version": version("cvm-gpu-telemetry"),
            "description": "Cards, the CVMs that they are in, and their history. Times are RFC 3339, UTC, with milliseconds;"
            " absent is null. Every error is a problem+json that says what is wrong and what is allowed.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _parameters(route: Route) -> list[dict[str, Any]]:
    schema = route.parameters.model_json_schema()
    return [
        _parameter(name, of, in_path=f"{{{name}}}" in route.path, required=name in schema.get("required", ()))
        for name, of in schema["properties"].items()
    ]


def _parameter(name: str, of: dict[str, Any], *, in_path: bool, required: bool) -> dict[str, Any]:
    """`of` is pydantic's; a parameter that may be left out is one that may be null there."""
    described = {key: of[key] for key in ("description",) if key in of}
    value = next((one for one in of.get("anyOf", ()) if one != {"type": "null"}), of)
    schema = {key: value[key] for key in value if key not in ("description", "title", "examples")}
    if "examples" in of:
        schema["examples"] = of["examples"]
    lists = {"style": "form", "explode": False} if schema.get("type") == "array" else {}
    return {
        "name": name,
        "in": "path" if in_path else "query",
        "required": required,
        **described,
        **lists,
        "schema": schema,
    }
