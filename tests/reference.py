"""docs/reference.md: commands and settings, metrics, routes, fields, outcomes, views, each from where the code has it. What the
code has no words for, such as what a route is for, is said here; a thing without words fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

from aggregator.comments import VIEWS
from aggregator.routes import EXPORT, PREFIX, ROUTES, openapi
from gpuwire.address import GRAMMAR
from gpuwire.device import GAUGES
from gpuwire.errors import TelemetryError
from gpuwire.pb.guest_api_pb2 import DESCRIPTOR as GUEST_API
from gpuwire.pb.vmm_pb2 import DESCRIPTOR as VMM
from gpuwire.service import SECONDS
from host_proxy.vms import KEYS
from tests.inventory import PROGRAMS, Series, commands, metrics, routes

SETTINGS = f"""\
Flags win over the environment, the environment over the file that `--config` names: TOML, with the keys below. A flag that may
be repeated (`...`) is a list there, and separated by blanks in the environment. SECONDS take fractions; a PERIOD is `7d`,
`12h`, `90m` or a number of seconds; an ADDR is one of {GRAMMAR}."""

METRICS = """\
A value that is not known is no series. What to scrape, and alerts: [prometheus.md](prometheus.md). A histogram has the usual
`_bucket`, `_sum` and `_count`."""

ROUTES_SAID = """\
GET goes with HEAD. Where a token is asked for: [host-proxy.md](host-proxy.md#who-may-call), [api.md](api.md#who-may-ask)."""

# What the API's own definitions do not say.
_SAYS = {
    "gpu-guest-agent, guest API": {
        "/api/{method}": "A call of `guest_api.GuestApi`, pRPC; GET or POST, JSON or protobuf.",
    },
    "gpu-guest-agent, external": {
        "/": "The dashboard; figures with `public_sysinfo` only.",
        "/metrics": "Prometheus page; with `public_sysinfo` only.",
    },
    "gpu-host-proxy": {
        "/guest/{method}": "A call of `guest_api.ProxiedGuestApi`, passed on to the guest that `id` names; bytes untouched.",
        "/prpc/{method}": "A call of `vmm.Vmm`: the upstream's reply, or our own where there is no upstream.",
        "/guests/GpuInfo": "GpuInfo of many guests in one call: in, a `vmm.GuestsRequest` of ids (none: all); out, a frame a"
        " guest, as they answer.",
        "/metrics": "Prometheus page of the proxy itself.",
        "/guest-metrics": "Prometheus page of the guest `id`, with the host's addresses.",
        "/sd": "Prometheus' HTTP service discovery: a target a VM.",
        "/healthz": "`ok`, or `degraded` with each source's problem; needs no token.",
    },
    "gpu-aggregator": {
        "/": "The fleet's page.",
        "/static/{version}/{name}": "Its files; needs no token.",
        "/notices": "What stands on top of the page: the notice, the database's state, VMMs that are away.",
        "/metrics": "Prometheus page: the fleet, and the aggregator itself.",
        "/readyz": "200, or 503 with the reason while the database is away.",
        "/healthz": "200 while the program answers; needs no token.",
        "/openapi.json": "OpenAPI 3.1 document of `/api/v1`.",
    },
}

_VMS_KEYS = {
    "id": "text; the VM's id, by which it is called",
    "guest": "ADDR of its agent: `vsock:CID:PORT`, or `unix:`, `hybrid:`, `tcp:`",
    "name": "text; its name, for people",
    "app_id": "text; the app that it is an instance of",
    "instance_id": "text; the instance",
    "gpus": "list of host PCI addresses, in attach order; left out: nobody knows, 16 at most are believed",
    "pci_map": "table of guest PCI address to host PCI address: exact, where you know it",
    "hugepages": "true or false; true: the attach order says nothing ([host-addresses.md](host-addresses.md))",
}

# The words of a poll's outcome; a test holds them against the column's own words.
OUTCOMES = {
    "ok": "the guest answered with at least one card",
    "no_gpu": "it answered: it has no card",
    "nvml_error": "it answered: it cannot ask its cards; `detail` has its reason",
    "contested": "it answered, with a card that another running CVM has; its other cards are stored",
    "schema_mismatch": "refused, by the proxy or here: guest and host speak different versions",
    "unreachable": "its VMM answered, but the guest could not be reached",
    "timeout": "no answer in time, of the guest or of its VMM",
    "bad_reply": "an answer that does not decode, is too large, has an absurd age, or is the guest's own error",
    "not_running": "its VMM knows no running VM of this id",
    "vmm_unreachable": "its VMM does not answer: nothing is known of any of its CVMs",
}


def reference() -> str:
    lines = ["# Reference", "", "Made from the code by `make golden`.", "", "## Commands and settings", "", SETTINGS, ""]
    for program, cli in PROGRAMS.items():
        lines += [f"### {program}", "", first_line(cli), ""]
        for name, command in commands(cli):
            lines += [f"#### {program} {name}", "", first_line(command), "", *settings(command), ""]
    lines += ["### The vms file", "", "`--vms` of the proxy: a `[[vm]]` table a VM; `id` and `guest` are needed.", ""]
    lines += ["| key | |", "| --- | --- |", *(f"| `{key}` | {_VMS_KEYS[key]} |" for key in KEYS), ""]
    lines += ["## Metrics", "", METRICS, ""]
    for page, found in metrics().items():
        lines += [f"### {page}", "", *series(found), ""]
    lines += ["## Routes", "", ROUTES_SAID, "", *all_routes()]
    lines += ["## Fields of a card", "", *fields(), ""]
    lines += ["## Outcomes of a poll", "", "What each means for who is on call: [troubleshooting.md](troubleshooting.md).", ""]
    lines += ["| word | says |", "| --- | --- |", *(f"| `{word}` | {says} |" for word, says in OUTCOMES.items()), ""]
    lines += ["## Errors", "", "The word stands at the head of an error's message.", ""]
    lines += ["| word | HTTP status | says |", "| --- | --- | --- |"]
    lines += [f"| `{error.word}` | {error.status} | {first_line(error)} |" for error in sorted_errors()]
    lines += ["", "## SQL views", "", "Every column: [views.md](views.md).", "", "| view | a row is |", "| --- | --- |"]
    lines += [f"| [`{view}`](views.md#{view}) | {says} |" for view, says in VIEWS.items()]
    return "\n".join(lines) + "\n"


def first_line(documented: click.Command | type) -> str:
    text = documented.help if isinstance(documented, click.Command) else documented.__doc__
    return (text or "").splitlines()[0]


def settings(command: click.Command) -> Iterator[str]:
    prefix = command.context_settings.get("auto_envvar_prefix")
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            yield f"`{parameter.human_readable_name}`{'' if parameter.required else ' (may be left out)'} comes first."
            yield ""
    yield "| flag | environment | key | default | |"
    yield "| --- | --- | --- | --- | --- |"
    for parameter in command.params:
        if not isinstance(parameter, click.Option):
            continue
        default = parameter.default if parameter.show_default else ""
        shown = ", ".join(default) if isinstance(default, (list, tuple)) else default
        text, _, said = (parameter.help or "").partition("  [default: ")
        unit = " s" if parameter.type is SECONDS and shown not in ("", None) else ""
        repeated = " ..." if parameter.multiple else ""
        environment = f"`{prefix}_{parameter.name.upper()}`" if prefix and parameter.name else ""
        # A file cannot name another.
        key = f"`{parameter.name}`" if prefix and parameter.name != "config" else ""
        flag = f"`{cell(parameter.opts[0] + value(parameter))}`{repeated}"
        yield f"| {flag} | {environment} | {key} | {said.rstrip(']') or shown}{unit} | {cell(text)} |"


def value(option: click.Option) -> str:
    """What follows the flag; empty where nothing does."""
    if option.is_flag:
        return ""
    if isinstance(option.type, click.IntRange):
        low, high = option.type.min, option.type.max
        return f" {low} to {high}" if high is not None else f" N, at least {low}"
    return f" {option.make_metavar(click.Context(click.Command('')))}"


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def series(found: Sequence[Series]) -> Iterator[str]:
    yield "| series | type | labels | |"
    yield "| --- | --- | --- | --- |"
    for one in found:
        labels = ", ".join(f"`{label}`" for label in one.labels)
        yield f"| `{one.name}` | {one.type} | {labels} | {cell(one.help)} |"


def all_routes() -> Iterator[str]:
    api = {PREFIX + route.path: route for route in (*ROUTES, EXPORT)}
    for listener, found in routes().items():
        yield from (f"### {listener}", "", "| | path | |", "| --- | --- | --- |")
        for route in found:
            methods = "any" if route.methods == ("*",) else ", ".join(route.methods)
            says = api[route.path].summary if route.path in api else _SAYS[listener][route.path]
            yield f"| {methods} | `{route.path}` | {says} |"
        yield ""
        if listener == "gpu-aggregator":
            yield from _parameters()
    calls = GUEST_API.services_by_name
    yield from (
        "### Calls",
        "",
        "Messages are in `proto/gpuwire/pb/`. Over gRPC (`--grpc` of the proxy) `guest_api.ProxiedGuestApi`",
    )
    yield from ("is served, with reflection and `grpc.health.v1.Health`.", "")
    yield from ("| service | call | takes | gives |", "| --- | --- | --- | --- |")
    for service in (calls["GuestApi"], calls["ProxiedGuestApi"], VMM.services_by_name["Vmm"]):
        for method in service.methods:
            yield f"| `{service.full_name}` | `{method.name}` | {method.input_type.name} | {method.output_type.name} |"
    yield ""


def _parameters() -> Iterator[str]:
    said: dict[tuple[str, str], None] = {}
    yield from ("Parameters; `/openapi.json` has their form and limits, [api.md](api.md) what they mean together.", "")
    yield from ("| path | parameters |", "| --- | --- |")
    for path, operations in openapi(ROUTES)["paths"].items():
        found = operations["get"]["parameters"]
        said.update(((parameter["name"], parameter["description"]), None) for parameter in found)
        yield f"| `{path}` | {', '.join('`' + parameter['name'] + '`' for parameter in found)} |"
    yield from ("", "| parameter | |", "| --- | --- |")
    yield from (f"| `{name}` | {cell(text)} |" for name, text in sorted(said))
    yield ""


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
