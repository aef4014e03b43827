"""Grafana's dashboard JSON, as little of it as is needed: what a panel asks, how it is shown, where it lies. Pure. What is
asked of the fleet is in fleet.py, which dashboards there are in dashboards.py."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import dedent
from typing import Any

Json = dict[str, Any]

SCHEMA_VERSION = 39  # Grafana 11's; a newer one brings it up to date as it loads it
COLUMNS = 24
LINE = 128
TAG = "gpu"
PROMETHEUS: Json = {"type": "prometheus", "uid": "${prometheus}"}
POSTGRES: Json = {"type": "grafana-postgresql-datasource", "uid": "${postgres}"}

# Okabe and Ito's, which colour-blind readers can tell apart, and two more.
GREEN, BLUE, SKY, YELLOW, ORANGE, RED, PINK = "#009E73", "#0072B2", "#56B4E9", "#F0E442", "#E69F00", "#D55E00", "#CC79A7"
GREY, VIOLET, BROWN = "#999999", "#8B6BB1", "#9C6644"


# What is asked


def prom(expr: str, legend: str = "__auto", *, now: bool = False, ref: str = "A") -> Json:
    """Over time; or `now`, at the end of the range only: what has ended by then is not shown as if it went on."""
    times = {"range": not now, "instant": now, "format": "time_series"}
    return {"refId": ref, "datasource": PROMETHEUS, "editorMode": "code", "expr": flat(expr), "legendFormat": legend, **times}


def prom_table(*exprs: str) -> list[Json]:
    """One instant of each, named A, B, ...; their values are the columns `Value #A`, ..."""
    letters = "ABCDEFGHIJ"
    return [{**prom(expr, now=True, ref=ref), "format": "table"} for ref, expr in zip(letters, exprs, strict=False)]


def sql(query: str, *, series: bool = False) -> Json:
    """A table; or `series` over its column `time`, one for each value of its text columns."""
    shape = "time_series" if series else "table"
    text = dedent(query).strip()
    return {"refId": "A", "datasource": POSTGRES, "editorMode": "code", "rawQuery": True, "rawSql": text, "format": shape}


def flat(expr: str) -> str:
    return " ".join(expr.split()).replace("( ", "(").replace(" )", ")")


# How it is shown


@dataclass(frozen=True)
class Panel:
    """Without its number and place, which its dashboard gives it. `width` is of 24 columns."""

    body: Json
    width: int
    height: int


def panel(
    kind: str,
    title: str,
    description: str,
    targets: Sequence[Json],
    *,
    size: tuple[int, int],
    defaults: Json,
    options: Json,
    overrides: Iterable[Json] = (),
    transformations: Sequence[Json] = (),
    interval: str = "",
) -> Panel:
    body: Json = {"type": kind, "title": title, "description": description, "datasource": targets[0]["datasource"]}
    body |= {"targets": list(targets), "fieldConfig": {"defaults": defaults, "overrides": list(overrides)}, "options": options}
    if transformations:
        body["transformations"] = list(transformations)
    if interval:
        body["interval"] = interval
    return Panel(body, *size)


def thresholds(*steps: tuple[float, str], below: str = GREEN) -> Json:
    """`below` up to the first step."""
    colours = [{"color": below, "value": None}, *({"color": colour, "value": value} for value, colour in steps)]
    return {"color": {"mode": "thresholds"}, "thresholds": {"mode": "absolute", "steps": colours}}


PLAIN = thresholds(below=BLUE)
ALARM = thresholds((1, RED))
# What is nowhere told is a dash, never 0.
UNKNOWN: Json = {"noValue": "–"}


def words(colours: Mapping[str, str]) -> Json:
    """Mappings of a text's values to their colours."""
    options = {word: {"color": colour, "index": number} for number, (word, colour) in enumerate(colours.items())}
    return {"mappings": [{"type": "value", "options": options}]}


def flags(yes: tuple[str, str], no: tuple[str, str]) -> Json:
    """Mappings of 1 and 0 to a word and a colour each."""
    options = {
        value: {"text": text, "color": colour, "index": number}
        for number, (value, (text, colour)) in enumerate([("1", yes), ("0", no)])
    }
    return {"mappings": [{"type": "value", "options": options}]}


def coloured(colours: Mapping[str, str]) -> list[Json]:
    """Series by their names."""
    return [override(name, color={"mode": "fixed", "fixedColor": colour}) for name, colour in colours.items()]


def override(name: str, **properties: Any) -> Json:
    """`__` in a property's name is a dot."""
    values = [{"id": key.replace("__", "."), "value": value} for key, value in properties.items()]
    return {"matcher": {"id": "byName", "options": name}, "properties": values}


def stat(
    title: str, description: str, expr: str, *, unit: str = "short", width: int = 3, name: str = "", **defaults: Any
) -> Panel:
    """One figure, or where `name` is a series' legend its text, of now."""
    reduced = {"calcs": ["last"], "fields": "", "values": False}
    shown: Json = {"colorMode": "value", "graphMode": "none", "textMode": "name" if name else "value", "justifyMode": "center"}
    return panel(
        "stat",
        title,
        description,
        [prom(expr, name or "__auto", now=True)],
        size=(width, 4),
        defaults={"unit": unit, **UNKNOWN, **(defaults or PLAIN)},
        options={"reduceOptions": reduced, "orientation": "auto", "wideLayout": True, **shown},
    )


def graph(
    title: str,
    description: str,
    targets: Sequence[Json] | Json,
    *,
    unit: str,
    width: int = 12,
    height: int = 8,
    stacked: bool = False,
    bars: bool = False,
    overrides: Iterable[Json] = (),
    interval: str = "",
    transformations: Sequence[Json] = (),
    **defaults: Any,
) -> Panel:
    """Time in which there is nothing is a gap."""
    custom: Json = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 0,
        "showPoints": "auto",
        "pointSize": 3,
        "spanNulls": False,
    }
    custom["axisSoftMin"] = 0
    if stacked:
        custom |= {"stacking": {"mode": "normal", "group": "A"}, "fillOpacity": 60}
    if bars:
        custom |= {"drawStyle": "bars", "fillOpacity": 80, "showPoints": "never"}
    if "thresholds" in defaults:
        custom["thresholdsStyle"] = {"mode": "dashed"}
        defaults["color"] = {"mode": "palette-classic"}
    return panel(
        "timeseries",
        title,
        description,
        [targets] if isinstance(targets, dict) else targets,
        size=(width, height),
        defaults={"unit": unit, "custom": custom, **defaults},
        options={
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        overrides=overrides,
        interval=interval,
        transformations=transformations,
    )


def timeline(
    title: str,
    description: str,
    target: Json,
    *,
    width: int = 24,
    height: int = 8,
    by: str = "",
    values: str = "auto",
    overrides: Iterable[Json] = (),
    **defaults: Any,
) -> Panel:
    """A strip for each series; of a table, for each value of its column `by`."""
    split: list[Json] = []
    if by:
        options = {"fields": [by], "keepFields": False, "naming": {"asLabels": True}}
        split = [{"id": "partitionByValues", "options": options}]
        defaults |= {"displayName": f"${{__field.labels.{by}}}"}
    return panel(
        "state-timeline",
        title,
        description,
        [target],
        size=(width, height),
        defaults={"custom": {"lineWidth": 1, "fillOpacity": 80, "spanNulls": False}, **defaults},
        options={
            "showValue": values,
            "mergeValues": True,
            "alignValue": "left",
            "rowHeight": 0.85,
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
            "tooltip": {"mode": "single", "sort": "none"},
        },
        overrides=overrides,
        transformations=split,
    )


@dataclass(frozen=True)
class Column:
    """`shown` are more of Grafana's field settings."""

    head: str
    unit: str = ""
    link: Json | None = None
    colours: Mapping[str, str] = field(default_factory=dict)
    shown: Mapping[str, Any] = field(default_factory=dict)

    def override(self, name: str) -> Json:
        properties: Json = {"displayName": self.head}
        if self.unit:
            properties["unit"] = self.unit
        if self.link:
            properties["links"] = [self.link]
        if self.colours:
            properties |= {**words(self.colours), "custom__cellOptions": {"type": "color-text"}}
        return override(name, **properties, **self.shown)


def table(
    title: str,
    description: str,
    targets: Sequence[Json],
    columns: Mapping[str, Column],
    *,
    width: int = 24,
    height: int = 9,
    sort: str = "",
) -> Panel:
    """Its `columns` in their order, by their names in the answers; answers of several targets are joined by what they share."""
    left_out: list[str] = []
    if targets[0]["datasource"] is PROMETHEUS:
        # Of one target alone they are not numbered.
        left_out = ["Time", *([f"Value #{target['refId']}" for target in targets] if len(targets) > 1 else ["Value"])]
    order: Json = {
        "indexByName": {name: number for number, name in enumerate(columns)},
        "excludeByName": {name: True for name in left_out if name not in columns},
        "renameByName": {},
    }
    return panel(
        "table",
        title,
        description,
        targets,
        size=(width, height),
        defaults={"custom": {"align": "auto", "filterable": True, "cellOptions": {"type": "auto"}}, **UNKNOWN},
        options={"showHeader": True, "cellHeight": "sm", "sortBy": [{"displayName": sort, "desc": True}] if sort else []},
        overrides=[column.override(name) for name, column in columns.items()],
        transformations=[*([{"id": "merge", "options": {}}] if len(targets) > 1 else []), {"id": "organize", "options": order}],
    )


def percent_bar() -> Json:
    return {
        "min": 0,
        "max": 100,
        "custom__cellOptions": {"type": "gauge", "mode": "basic", "valueDisplayMode": "text"},
        **PLAIN,
    }


# Ways from one dashboard to the next


def link(title: str, uid: str, **variables: str) -> Json:
    """`variables` are names of columns, or, led by a dot, of a series' labels."""
    values = {
        name: f"${{__field.labels{value}:percentencode}}" if value[0] == "." else f"${{__data.fields.{value}:percentencode}}"
        for name, value in variables.items()
    }
    query = "".join(f"var-{name}={value}&" for name, value in values.items())
    kept = "${prometheus:queryparam}&${postgres:queryparam}&${__url_time_range}"
    return {"title": title, "url": f"/d/{uid}?{query}{kept}", "targetBlank": False}


# Dashboards


@dataclass(frozen=True)
class Row:
    """Lines of panels; `title` is empty for what stands at the top. A row that is shut asks nothing until it is opened."""

    title: str
    lines: Sequence[Sequence[Panel]]
    shut: bool = False


def source(name: str, label: str, kind: str) -> Json:
    return {"name": name, "label": label, "type": "datasource", "query": kind, "regex": "", "refresh": 1, "hide": 0}


SOURCES = [source("prometheus", "Prometheus", "prometheus"), source("postgres", "PostgreSQL", POSTGRES["type"])]


def variable(name: str, label: str, query: str, *, many: bool = False, regex: str = "", asked: int = 1) -> Json:
    """`asked` is Grafana's number of the kind of query: 1 for label_values, 3 for query_result."""
    asking = {"query": query, "qryType": asked, "refId": "PrometheusVariableQueryEditor-VariableQuery"}
    chosen = {"current": {"text": ["All"], "value": ["$__all"]}} if many else {}
    order = {"refresh": 2, "sort": 7, "hide": 0, "regex": regex, "multi": many, "includeAll": many}
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": PROMETHEUS,
        "query": asking,
        "definition": query,
        **order,
        **chosen,
    }


def dashboard(uid: str, title: str, description: str, variables: Sequence[Json], rows: Sequence[Row]) -> Json:
    """Lays the panels out, line by line, and numbers them."""
    panels: list[Json] = []
    y, number = 0, 0

    def placed(body: Json, x: int, width: int, height: int) -> Json:
        nonlocal number
        number += 1
        return {"id": number, "gridPos": {"x": x, "y": y, "w": width, "h": height}, **body}

    for row in rows:
        where = panels
        if row.title:
            head = placed({"type": "row", "title": row.title, "collapsed": row.shut, "panels": []}, 0, COLUMNS, 1)
            panels.append(head)
            y += 1
            where = head["panels"] if row.shut else panels
        for line in row.lines:
            x = 0
            for one_panel in line:
                where.append(placed(one_panel.body, x, one_panel.width, one_panel.height))
                x += one_panel.width
            y += max(one_panel.height for one_panel in line)
    others = {"type": "dashboards", "title": "GPU", "tags": [TAG], "asDropdown": False, "keepTime": True, "includeVars": False}
    others |= {"targetBlank": False, "icon": "external link", "tooltip": "", "url": ""}
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": [TAG],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "time": {"from": "now-24h", "to": "now"},
        "refresh": "1m",
        "timezone": "browser",
        "links": [others],
        "annotations": {"list": []},
        "templating": {"list": list(variables)},
        "panels": panels,
    }


def history(*lines: Sequence[Panel]) -> Row:
    return Row("History, from PostgreSQL: choose a longer range", lines, shut=True)


def written(value: Any, indent: int = 0, before: int = 0) -> str:
    """JSON that can be read: on one line what fits there, behind `before` characters."""
    line = json.dumps(value, ensure_ascii=False)
    if indent + before + len(line) < LINE or not isinstance(value, (dict, list)):
        return line
    inner = indent + 2
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {written(item, inner, len(key) + 4)}" for key, item in value.items()]
    else:
        parts = [written(item, inner) for item in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return f"{begin}\n" + ",\n".join(f"{' ' * inner}{part}" for part in parts) + f"\n{' ' * indent}{end}"
