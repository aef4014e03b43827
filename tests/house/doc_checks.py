"""What a document names, held against what there is. Pure, but for the files that it names: each check is given a document and
returns what is wrong in it, a line each. test_docs.py asks them of all documents, and of one that is wrong on purpose."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import click
from multidict import MultiDict

from aggregator.parameters import read_parameters
from aggregator.reports import reports
from aggregator.routes import EXPORT, PREFIX, ROUTES
from aggregator.routes import Route as ApiRoute
from demo.__main__ import main as demo
from gpuwire.errors import Malformed
from gpuwire.pb.guest_api_pb2 import DESCRIPTOR as GUEST_API
from gpuwire.pb.vmm_pb2 import DESCRIPTOR as VMM
from host_proxy.vms import parse_vms
from tests.inventory import PROGRAMS, commands, metrics, routes

ROOT = Path(__file__).parents[2]
PLACEHOLDER = re.compile(r"\.\.\.|…|[A-Z][A-Z0-9_]*|<.*>|.*\$.*")


@dataclass(frozen=True)
class Document:
    """Markdown; `path` is where links in it start from."""

    path: Path
    text: str

    @cached_property
    def blocks(self) -> list[tuple[str, str]]:
        """Fenced ones, with their language."""
        return re.findall(r"^```(\w*)\n(.*?)^```$", self.text, re.MULTILINE | re.DOTALL)

    @cached_property
    def prose(self) -> str:
        return re.sub(r"^```.*?^```$", "", self.text, flags=re.MULTILINE | re.DOTALL)

    @cached_property
    def spans(self) -> list[str]:
        """Inline code."""
        return [" ".join(span.split()).replace("\\|", "|") for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", self.prose)]

    @cached_property
    def calls(self) -> list[list[str]]:
        """Commands of the shell, in words: those of blocks, pipelines and lists taken apart, and of inline code the first."""
        lines = [
            line.removeprefix("$ ")
            for language, block in self.blocks
            if language in ("sh", "bash", "text", "")
            for line in block.replace("\\\n", " ").splitlines()
        ]
        found = [words for line in lines for words in _taken_apart(line)]
        return [words for words in (*found, *(next(_taken_apart(span), []) for span in self.spans)) if words]


def _taken_apart(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(re.sub(r"(^|\s)#.*", "", line), posix=True, punctuation_chars="|;&")
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        for word in lexer:
            if word in (">", ">>", "2>", "<"):
                next(lexer, "")
                continue
            if word and set(word) <= set("|;&"):
                yield words
                words = []
            elif words or not re.fullmatch(r"[A-Z_]+=.*|sudo|time", word):
                words.append(word)
    except ValueError:  # prose with an apostrophe
        return
    if words:
        yield words


# Links and files


def links(doc: Document) -> Iterator[str]:
    targets = re.findall(r"\]\(([^)\s]+)\)", doc.prose) + re.findall(r'(?:src|srcset|href)="([^"\s]+)"', doc.prose)
    for link in targets:
        if re.match(r"https?:|mailto:", link):
            continue
        file, _, anchor = link.partition("#")
        path = (doc.path.parent / file) if file else doc.path
        if file and not path.exists():
            yield f"{link}: no such file"
        elif anchor and anchor not in anchors(path.read_text() if file else doc.text):
            yield f"{link}: no such heading"


def anchors(markdown: str) -> set[str]:
    """As GitHub makes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", Document(ROOT, markdown).prose, re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        found.add(next(each for each in (anchor, *(f"{anchor}-{n}" for n in range(1, 99))) if each not in found))
    return found


ROOMS = "proto|gpuwire|guest_agent|host_proxy|aggregator|migrations|deploy|demo|bench|tests|docs"


def files(doc: Document) -> Iterator[str]:
    for path in re.findall(rf"(?<![\w./-])(?:\./)?((?:{ROOMS})/[\w/.*-]*[\w*])", doc.text):
        if not any(ROOT.glob(path)) and not (ROOT / path).with_suffix(".py").exists():
            yield f"{path}: no such file"


def units(doc: Document) -> Iterator[str]:
    for unit in re.findall(r"\bgpu-[a-z-]+\.(?:service|socket|rules\.yml)\b", doc.text):
        if not any((ROOT / "deploy").glob(f"*/{unit}")):
            yield f"{unit}: not in deploy/"


def extras(doc: Document) -> Iterator[str]:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"(?:(?<=[\s'\"`])\.|cvm-gpu-telemetry|\.whl)\[([a-z,]+)\]", doc.text):
        yield from (f"[{extra}]: no such extra" for extra in named.split(",") if extra not in known)


# Commands


def make_targets(doc: Document) -> Iterator[str]:
    makefile = (ROOT / "Makefile").read_text()
    for words in doc.calls:
        if words[:1] == ["make"]:
            for word in words[1:]:
                name, is_variable, value = word.partition("=")
                if is_variable and f"$({name})" not in makefile:
                    yield f"make {word}: no such variable"
                elif name == "DEMO_ARGS":
                    yield from _wrong(demo, "make demo", shlex.split(value))
                elif not is_variable and not re.search(rf"^{re.escape(word)}:", makefile, re.MULTILINE):
                    yield f"make {word}: no such target"


def programs(doc: Document) -> Iterator[str]:
    """Those of ours: the command is there, and takes what it is given."""
    for words in doc.calls:
        name, *arguments = words
        name = name.rpartition("/")[2]
        if name not in PROGRAMS or not arguments or arguments[0] in ("--version", "--help"):
            continue
        found = [
            (words, command) for words, command in commands(PROGRAMS[name]) if arguments[: len(words.split())] == words.split()
        ]
        if found:
            called, command = found[0]
            yield from _wrong(command, f"{name} {called}", arguments[len(called.split()) :])
        elif arguments[0] not in PROGRAMS[name].commands or len(arguments) > 1:
            yield f"{name} {arguments[0]}: no such command"


def _wrong(command: click.Command, name: str, arguments: Sequence[str]) -> Iterator[str]:
    """What click would refuse; files need not be there, and PLACEHOLDERS stand for what is right."""
    context = click.Context(command)
    flags = {flag for parameter in command.params for flag in parameter.opts}
    given = [word for word in arguments if not (word.startswith("--") and PLACEHOLDER.fullmatch(word))]
    if unknown := [flag for word in given if (flag := word.partition("=")[0]).startswith("--") and flag not in flags]:
        if unknown != ["--help"]:
            yield f"{name}: no flag {', '.join(unknown)}"
        return
    try:
        values, left, _ = command.make_parser(context).parse_args(args=list(given))
    except click.UsageError as error:
        yield f"{name} {shlex.join(given)}: {error.format_message()}"
        return
    if left and not all(PLACEHOLDER.fullmatch(word) for word in left):
        yield f"{name}: takes no {' '.join(left)}"
    for parameter in command.params:
        found = values.get(parameter.name)
        if found is None or isinstance(parameter.type, click.Path) or getattr(parameter, "is_flag", False):
            continue
        for value in found if isinstance(found, (list, tuple)) else [found]:
            try:
                if not PLACEHOLDER.fullmatch(str(value)) and "#token-file=" not in str(value):
                    parameter.type.convert(value, parameter, context)
            except click.BadParameter as error:
                yield f"{name}: {error.format_message()}"
    report = values.get("name") if name == "gpu-aggregator report" else None
    if isinstance(report, str) and report not in reports() and not PLACEHOLDER.fullmatch(report):
        yield f"{name} {report}: no such report"


def flags(doc: Document) -> Iterator[str]:
    """A flag that stands alone in inline code is one of some program of ours, or of one that the sentence names."""
    known = {flag for cli in PROGRAMS.values() for _, command in commands(cli) for p in command.params for flag in p.opts}
    known |= {flag for parameter in demo.params for flag in parameter.opts} | {"--help", "--version"}
    for span in doc.spans:
        flag = re.match(r"--[a-z0-9-]+(?![\w.-])", span)
        if flag and flag[0] not in known and not any(flag[0] in _flags_of(path) for path in ROOT.glob("bench/*.py")):
            yield f"{flag[0]}: no such flag"


@cache
def _flags_of(path: Path) -> frozenset[str]:
    """Of a program without click."""
    return frozenset(re.findall(r'"(--[a-z-]+)"', path.read_text()))


def modules(doc: Document) -> Iterator[str]:
    for words in doc.calls:
        if "-m" not in words[:2] or not re.fullmatch(r"(?:.*/)?python3?", words[0]):
            continue
        name, *arguments = words[2:]
        if name.partition(".")[0] not in ROOMS.split("|"):
            continue
        path = ROOT / name.replace(".", "/")
        if name == "demo":
            yield from _wrong(demo, "python -m demo", arguments)
        elif not path.with_suffix(".py").exists() and not (path / "__main__.py").exists():
            yield f"python -m {name}: no such module"
        else:
            source = path.with_suffix(".py")
            wrong = [word for word in arguments if word.startswith("--") and word not in _flags_of(source)]
            yield from (f"python -m {name}: no flag {word}" for word in wrong)


def environment(doc: Document) -> Iterator[str]:
    known = {
        f"{prefix}_{parameter.name.upper()}"
        for cli in PROGRAMS.values()
        for _, command in commands(cli)
        if (prefix := command.context_settings.get("auto_envvar_prefix"))
        for parameter in command.params
        if parameter.name
    }
    for name in re.findall(r"\b(?:GUEST_AGENT|HOST_PROXY|AGGREGATOR)_[A-Z0-9_]*\w(?![*])", doc.text):
        if name not in known:
            yield f"{name}: no such setting"


def toml(doc: Document) -> Iterator[str]:
    for language, block in doc.blocks:
        if language != "toml":
            continue
        if "[[vm]]" in block:
            try:
                parse_vms(block)
            except ValueError as error:
                yield f"vms file: {error}"
            continue
        keys = tomllib.loads(block).keys()
        known = [{p.name for p in cli.commands["serve"].params} for cli in PROGRAMS.values()]
        if not any(keys <= of_one for of_one in known):
            yield f"{', '.join(sorted(keys - set().union(*known)) or keys)}: no such keys of one program"


# Metrics

METRIC = re.compile(
    r"(?<![\w:/.-])((?:dstack_gpu|dstack_guest|gpu_aggregator|gpu_host_proxy)_[a-z0-9_]+)(?![\w:])(\*?)(\{[^}]*\})?"
)


def series(doc: Document) -> Iterator[str]:
    """A series is there, and has the labels that it is asked by."""
    known: dict[str, set[str]] = {}
    for found in metrics().values():
        for one in found:
            for name in {one.name, *one.names}:
                known.setdefault(name, {"job", "instance", "le"}).update(one.labels)
    recorded = set(re.findall(r"- record: (\S+)", (ROOT / "deploy/prometheus/gpu-fleet.rules.yml").read_text()))
    for name, star, selector in METRIC.findall(doc.text):
        if star or name.endswith("_"):
            if not any(each.startswith(name) for each in known):
                yield f"{name}*: no such series"
        elif name not in known:
            yield f"{name}: no such series"
        else:
            labels = re.findall(r"(\w+)\s*(?==|!|,|\})", re.sub(r'"[^"]*"', '""', selector))
            yield from (f"{name}: has no label {label}" for label in labels if label not in known[name])
    for name in re.findall(r"(?<![\w:])[a-z_]+:(?:dstack|gpu)_\w+:\w+", doc.text):
        if name not in recorded:
            yield f"{name}: no rule records it"


def alerts(doc: Document) -> Iterator[str]:
    """What begins with Gpu in inline code is an alert, or a name of the protocol or of the code."""
    known = set(re.findall(r"- alert: (\w+)", (ROOT / "deploy/prometheus/gpu-fleet.rules.yml").read_text()))
    known |= {*GUEST_API.message_types_by_name, *VMM.message_types_by_name, "GpuInfo", "GpuSnapshot"}
    yield from (f"{span}: no such alert" for span in doc.spans if re.fullmatch(r"Gpu[A-Z]\w+", span) and span not in known)


# Routes

# First parts of paths that are files; ports of Grafana, Prometheus, Alertmanager and node_exporter are not ours either.
FOLDERS = {
    "bin",
    "boot",
    "dev",
    "dstack",
    "etc",
    "home",
    "lib",
    "opt",
    "path",
    "proc",
    "run",
    "srv",
    "sys",
    "tmp",
    "usr",
    "var",
}
OURS = re.compile(
    r"https?://(?:localhost|127\.0\.0\.1|host-1|aggregator-1|[a-z-]+\.example)(?!:(?:3000|9090|9093|9100)\b)(?::\d+)?(/[^\s'\"`<>)|]*)(.*)"
)


def paths(doc: Document) -> Iterator[str]:
    """Paths of URLs and of inline code are routes; what the API is asked, it takes."""
    for line in doc.text.splitlines():
        for url, rest in OURS.findall(line):
            yield from _no_route(urlsplit(url).path) or _asked(url, refused="# 400" in rest)
    for span in doc.spans:
        path = re.fullmatch(r"(?:GET |POST )?(/[\w{}<>./-]*)(?:\?\S*)?", span)
        if path and path[1].split("/")[1] not in FOLDERS:
            yield from _no_route(path[1])


def _no_route(path: str) -> list[str]:
    known = [route.path for found in routes().values() for route in found]
    # A word in brackets stands for any; a prefix with a slash at its end for all behind it.
    template = re.sub(r"<\w[\w ]*>|\{\w+\}", "any", path)
    if any(_fits(template, route) for route in known) or (path.endswith("/") and any(each.startswith(path) for each in known)):
        return []
    return [] if path == PREFIX else [f"{path}: no such route"]


def _asked(url: str, *, refused: bool) -> Iterator[str]:
    """Whether the API takes what it is asked."""
    parts = urlsplit(url)
    route = next((each for each in (*ROUTES, EXPORT) if _fits(parts.path, PREFIX + each.path)), None)
    if route is not None:
        problem = _problem(route, parts.path, parts.query)
        if bool(problem) != refused:
            yield f"{url}: {problem or 'is taken, but the document says that it is refused'}"


def _problem(route: ApiRoute, path: str, query: str) -> str:
    names = re.findall(r"\{(\w+)\}", route.path)
    match = re.fullmatch(re.sub(r"\{\w+\}", "([^/]+)", PREFIX + route.path), path)
    assert match is not None
    try:
        read_parameters(route.parameters, dict(zip(names, match.groups(), strict=True)), MultiDict(parse_qsl(query)))
    except Malformed as error:
        return str(error)
    return ""


def _fits(path: str, route: str) -> bool:
    method = {"/guest/{method}": GUEST_API.services_by_name["ProxiedGuestApi"], "/prpc/{method}": VMM.services_by_name["Vmm"]}
    if route in method and not path.endswith("/any"):
        return path in {route.replace("{method}", each.name) for each in method[route].methods}
    return re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", route), path) is not None


CHECKS: dict[str, Callable[[Document], Iterator[str]]] = {
    check.__name__: check
    for check in (
        links,
        files,
        units,
        extras,
        make_targets,
        programs,
        flags,
        modules,
        environment,
        toml,
        series,
        alerts,
        paths,
    )
}  # fmt: skip
