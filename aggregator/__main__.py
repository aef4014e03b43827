"""The command line of gpu-aggregator."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from json import dumps
from pathlib import Path
from typing import Any, TypeVar

import click
from multidict import MultiDict

from aggregator.app import serve
from aggregator.calls import Slots
from aggregator.check import as_json, as_text, problems
from aggregator.errors import DatabaseAway, QueryTooSlow, Unstorable
from aggregator.fleet import Registered
from aggregator.identity import Identity
from aggregator.leases import this_process
from aggregator.metrics import SelfMetrics
from aggregator.outcome import ANSWERED, CONTESTED, NO_GPU, OK, VMM_UNREACHABLE
from aggregator.parameters import read_parameters
from aggregator.poller import Poller, Shared, Unaskable, poll_once
from aggregator.reports import Report, prepare, reports, run_report, statement_text
from aggregator.reports.display import WIDTH, as_csv, as_object, as_table
from aggregator.reports.parameters import ReportParameters
from aggregator.rows import Poll
from aggregator.settings import (
    DAY_S,
    DEFAULT_INTERVAL_S,
    MIN_INTERVAL_S,
    PollSettings,
    Retention,
    Settings,
    Vmm,
    canonical,
    parse_period,
    parse_vmm,
    period,
)
from aggregator.store import Store
from aggregator.vmm_client import VmmConnections
from gpuwire import service
from gpuwire.access import EVERYTHING
from gpuwire.address import Address
from gpuwire.display import aligned
from gpuwire.errors import Malformed, NotRunning, StartError
from gpuwire.schema import Unversioned

F = TypeVar("F", bound=Callable[..., None])
MIN_STALE_AFTER_S = 120.0
STALE_MARGIN_S = 10.0
HOUR_S = 3600.0
REPORT_LIMIT_S = 300.0
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class VmmParam(click.ParamType):  # type: ignore[type-arg]
    name = "[NAME=]ADDR[#token-file=FILE]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return parse_vmm(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class PeriodParam(click.ParamType):  # type: ignore[type-arg]
    """A time to keep something for."""

    name = "PERIOD"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return value if isinstance(value, float) else parse_period(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


PERIOD = PeriodParam()


@click.group()
@click.version_option(package_name="cvm-gpu-telemetry")
def cli() -> None:
    """Polls the GPUs of every confidential VM and keeps their history."""


def db_option(function: F) -> F:
    return click.option(
        "--db",
        default="sqlite:///gpu-history.db",
        show_default=True,
        help="Database: sqlite:///FILE or postgresql://USER@HOST/NAME.",
    )(function)


def poll_options(function: F) -> F:
    """The flags of PollSettings."""
    for option in (
        service.schema_options(unversioned=Unversioned.ALLOW),
        click.option(
            "--concurrency",
            type=click.IntRange(min=1),
            default=64,
            show_default=True,
            help="Calls at once, at most; one that has waited for a tenth of its time does not count.",
        ),
        click.option(
            "--timeout", type=service.SECONDS, default=10, show_default=True, help="Time that a VMM has for one call."
        ),
        click.option(
            "--vmm",
            type=VmmParam(),
            metavar=VmmParam.name,
            multiple=True,
            help="VMM or host proxy to poll; NAME stands in the history. May be repeated.",
        ),
        click.option("--discover", is_flag=True, help="Poll the dstack VMMs that registered themselves on this host too."),
        db_option,
    ):
        function = option(function)
    return function


@service.command(cli, "serve", env="AGGREGATOR")
@poll_options
@click.option(
    "--listen",
    type=service.ADDRESS,
    default="127.0.0.1:8080",
    show_default=True,
    help="Where the page is served.",
)
@click.option("--token-file", type=FILE, help="Tokens that TCP callers must send as Authorization: Bearer; one a line.")
@click.option("--tls-cert", type=FILE, help="Certificate chain for a TCP listener, PEM; needs --tls-key.")
@click.option("--tls-key", type=FILE, help="Its key, PEM.")
@click.option(
    "--interval",
    type=service.SECONDS,
    default=DEFAULT_INTERVAL_S,
    show_default=True,
    help="Time between two polls of a CVM, at least 1. Samples of a card within 1 s are one: below 2 some may be missing.",
)
@click.option(
    "--stale-after", type=service.SECONDS, help="Age at which a sample is stale.  [default: 120, or 3 intervals if longer]"
)
@click.option(
    "--retention-raw",
    type=PERIOD,
    default="7d",
    show_default=True,
    help="How long samples are kept: 7d, 12h or 90m, at least 1h.",
)
@click.option(
    "--retention-5m",
    type=PERIOD,
    default="90d",
    show_default=True,
    help="How long buckets of 5 minutes are kept, at least 1d.",
)
@click.option(
    "--retention-1h",
    type=PERIOD,
    default="730d",
    show_default=True,
    help="How long buckets of an hour are kept, at least 1d.",
)
@click.option(
    "--spool",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for what waits while the database is away.  [default: FILE.spool beside a SQLite file, else "
    "gpu-aggregator-spool]",
)
@click.option("--upgrade", is_flag=True, help="Upgrade a database of an older version before starting.")
@click.option("--notice", default="", help="A line to show on top of the page, such as: staging fleet.")
def serve_command(interval: float, stale_after: float | None, **flags: Any) -> None:
    """Poll the fleet and serve its page."""
    if interval < MIN_INTERVAL_S:
        raise click.UsageError(
            f"--interval {interval:g} is too short: at least {MIN_INTERVAL_S:g},"
            " samples of a card that are nearer are taken for one"
        )
    if stale_after is None:
        stale_after = max(MIN_STALE_AFTER_S, 3 * interval)
    elif stale_after < interval + STALE_MARGIN_S:
        raise click.UsageError(
            f"--stale-after {stale_after:g} is too short: at least the interval + {STALE_MARGIN_S:g} s = "
            f"{interval + STALE_MARGIN_S:g}, or every sample would be stale"
        )
    tls = service.tls_files(flags.pop("tls_cert"), flags.pop("tls_key"))
    own = {name: flags.pop(name) for name in ("db", "listen", "upgrade", "notice", "spool", "token_file")}
    own["retention"] = retention(*(flags.pop(f"retention_{name}") for name in ("raw", "5m", "1h")))
    settings = Settings(poll=poll_settings(**flags), interval=interval, stale_after=stale_after, tls=tls, **own)
    service.refuse_open_tcp("--listen", [settings.listen], settings.token_file)
    service.run(lambda stop: serve(settings, stop))


@service.command(cli, "poll", env="AGGREGATOR")
@poll_options
@click.option("--json", is_flag=True, help="Print JSON instead of a table.")
def poll_command(db: str, json: bool, **poll: Any) -> None:
    """Poll every running CVM once, store what came, print a line a CVM.

    Exit status 0 when all of them answered, 1 when some did not.
    """
    polled = service.run(lambda _stop: poll_and_store(db, poll_settings(**poll)))
    click.echo(poll_json(polled) if json else poll_table(polled))
    answered = all(poll.outcome in ANSWERED or poll.outcome == NotRunning.word for poll in polled.polls)
    sys.exit(0 if answered and not polled.failures and not polled.unaskable else 1)


@service.command(cli, "report", env="AGGREGATOR", log_level="warning")
@click.argument("name", required=False)
@click.option("--list", is_flag=True, help="Say which reports there are.")
@click.option("--since", help="From when on: 24h or 7d before the end, RFC 3339 or Unix seconds.  [default: 24h]")
@click.option("--until", help="Up to when: RFC 3339 or Unix seconds.  [default: now]")
@click.option(
    "--where",
    multiple=True,
    metavar="KEY=VALUE",
    help="Of these only: uuid, bdf, host_bdf, vmm, vm_id or app_id; or what the report is asked beside, such as by=app. May be"
    " repeated.",
)
@click.option("--format", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True, help="How to print.")
@click.option("--sql", is_flag=True, help="Print the SQL that would be run, for psql or sqlite3.")
@click.option("--time-zone", default="UTC", show_default=True, help="Whose days count, and what times are shown in.")
@db_option
def report_command(
    name: str | None,
    list: bool,
    since: str | None,
    until: str | None,
    where: tuple[str, ...],
    format: str,
    sql: bool,
    time_zone: str,
    db: str,
) -> None:
    """Answer one of the questions that operators ask, such as: which cards are idle."""
    if list:
        click.echo(aligned((report.name, report.purpose) for report in reports().values()))
        return
    if name is None or (report := reports().get(name)) is None:
        raise click.UsageError(
            f"{'name a report' if name is None else f'there is no report {name!r}'}; allowed: {', '.join(reports())}"
        )
    asked = asked_for(report, where, {"since": since, "until": until, "time_zone": time_zone})
    try:
        with closing(Store(db)) as store:
            store.require_file()
            store.require_current(upgrade_empty=False)
            with store.reading(REPORT_LIMIT_S) as reading:
                now_ms = time.time_ns() // 1_000_000
                if sql:
                    click.echo(statement_text(reading, prepare(reading, report, asked, EVERYTHING, now_ms)))
                    return
                found = run_report(reading, report, asked, EVERYTHING, now_ms)
    except Malformed as error:
        raise click.UsageError(without_head(error)) from None
    except (DatabaseAway, QueryTooSlow, Unstorable) as error:
        raise StartError(str(error)) from None
    match format:
        case "table":
            # Whoever reads a pipe wants whole names.
            click.echo(as_table(report, found, time_zone, WIDTH if sys.stdout.isatty() else None))
        case "csv":
            click.echo(as_csv(found, time_zone))
        case _:
            click.echo(dumps(as_object(report, found, time_zone), indent=2))


def asked_for(report: Report, where: Sequence[str], given: Mapping[str, str | None]) -> ReportParameters:
    """Raises click.UsageError naming what is wrong, and what is allowed."""
    query = MultiDict((name, value) for name, value in given.items() if value is not None)
    allowed = [name for name in report.model.model_fields if name not in given]
    for pair in where:
        key, equals, value = pair.partition("=")
        if not equals or key not in allowed:
            raise click.UsageError(f"--where {pair!r} is not allowed; allowed: KEY=VALUE with one of {', '.join(allowed)}")
        query.add(key, value)
    try:
        return read_parameters(report.model, {}, query)
    except Malformed as error:
        raise click.UsageError(without_head(error)) from None


def without_head(error: Malformed) -> str:
    """What is wrong, without the word and the advice for who asks over HTTP."""
    return str(error).removeprefix(f"{Malformed()}: ")


@cli.group("db")
def db_group() -> None:
    """Look after the database."""


@service.command(db_group, "upgrade", env="AGGREGATOR")
@db_option
def db_upgrade(db: str) -> None:
    """Bring the database to this program's schema; an empty one is filled with it."""
    with closing(Store(db)) as store:
        store.upgrade()
        click.echo(f"database {store.name} has schema {store.revision()}")


@service.command(db_group, "check", env="AGGREGATOR")
@db_option
@click.option("--json", is_flag=True, help="Print JSON instead of text.")
def db_check(db: str, json: bool) -> None:
    """Say what is in the database, what is wrong with it and what to do; nothing is changed.

    Exit status 0 when nothing is wrong, 1 when something is.
    """
    with closing(Store(db)) as store:
        condition = store.condition()
    click.echo(dumps(as_json(condition), indent=2) if json else as_text(condition))
    sys.exit(1 if problems(condition) else 0)


@service.command(db_group, "vacuum", env="AGGREGATOR")
@db_option
def db_vacuum(db: str) -> None:
    """Give back the room of deleted rows (SQLite), clear dead rows away (PostgreSQL); polls wait meanwhile, none is lost."""
    with closing(Store(db)) as store:
        store.vacuum(click.echo)


def retention(raw: float, five_minutes: float, hour: float) -> Retention:
    given = {"--retention-raw": raw, "--retention-5m": five_minutes, "--retention-1h": hour}
    for (flag, seconds), least_s in zip(given.items(), (HOUR_S, DAY_S, DAY_S), strict=True):
        if seconds < least_s:
            raise click.UsageError(f"{flag} {period(seconds)} is too short: at least {period(least_s)}")
    # What is coarser is made from what is finer, and is what is left of it.
    for (flag, seconds), (coarser, coarser_s) in pairwise(given.items()):
        if seconds > coarser_s:
            raise click.UsageError(f"{coarser} {period(coarser_s)} is shorter than {flag} {period(seconds)}: at least as long")
    return Retention(raw, five_minutes, hour)


def poll_settings(vmm: tuple[Vmm, ...], discover: bool, **rest: Any) -> PollSettings:
    if not vmm and not discover:
        raise click.UsageError("Missing option '--vmm': name a VMM to poll, or give --discover")
    if twice := [name for name, count in Counter(v.name for v in vmm).items() if count > 1]:
        raise click.UsageError(f"--vmm: the name {twice[0]!r} is used twice")
    by_address: dict[Address, Vmm] = {}
    for one in vmm:
        other = by_address.setdefault(canonical(one.address), one)
        if other is not one:
            raise click.UsageError(f"--vmm: {other.name} and {one.name} are one VMM, {one.address}: name it once")
    return PollSettings(vmms=vmm, discover=discover, **rest)


@dataclass(frozen=True, slots=True)
class Polled:
    """`failures` says by VMM why it could not be listed, `unaskable` which of its VMs have no id to ask them by."""

    polls: Sequence[Poll]
    failures: Mapping[str, str]
    unaskable: Sequence[tuple[str, Unaskable]]


async def poll_and_store(db: str, settings: PollSettings) -> Polled:
    if settings.discover:
        settings = replace(settings, vmms=(*settings.vmms, *Registered(settings.vmms).find()))
    with closing(Store(db)) as store:
        store.require_current()
        identity = Identity(DEFAULT_INTERVAL_S)
        identity.remember(store.known_cards(), time.time_ns() // 1_000_000, grace=False)
        connections = VmmConnections()
        slots = Slots(settings.concurrency, settings.timeout)
        shared = Shared(settings, connections, slots, identity, SelfMetrics())
        try:
            known = store.running_cvms(vmm.name for vmm in settings.vmms)
            pollers = [Poller(vmm, shared, [cvm for cvm in known if cvm.vmm == vmm.name]) for vmm in settings.vmms]
            polls, failures = await poll_once(pollers, identity)
            await connections.close()
            store.write(polls)
            store.leave_word(str(this_process()))
        except (DatabaseAway, Unstorable) as error:
            raise StartError(str(error)) from None
    return Polled(polls, failures, [(poller.vmm.name, vm) for poller in pollers for vm in poller.unaskable])


def cards_known(poll: Poll) -> bool:
    """Whether the CVM said which cards it has; none are an answer too."""
    return bool(poll.samples) or poll.outcome in (OK, NO_GPU, CONTESTED)


def poll_table(polled: Polled) -> str:
    """A line a CVM, aligned, then a line a VM that could not be asked and one a VMM that could not be listed."""
    rows = [("VMM", "VM", "NAME", "OUTCOME", "GPUS", "DETAIL")]
    rows += [
        (p.cvm.vmm, p.cvm.vm_id, p.cvm.vm_name, p.outcome, str(len(p.samples)) if cards_known(p) else "-", p.detail)
        for p in sorted(polled.polls, key=lambda p: (p.cvm.vmm, p.cvm.vm_id))
    ]
    rows += [(vmm, vm.vm_id or "-", vm.vm_name or "-", "unaskable", "-", vm.problem) for vmm, vm in polled.unaskable]
    rows += [(name, "-", "-", VMM_UNREACHABLE, "-", reason) for name, reason in polled.failures.items()]
    return aligned(rows)


def poll_json(polled: Polled) -> str:
    """One object: `cvms`, an entry a CVM, its `gpus` null where it did not say which it has; `vms_unaskable`, one a VM that has
    no id to ask it by; `vmms_unreachable`, by name why."""
    cvms = [
        {
            **asdict(p.cvm),
            "outcome": p.outcome,
            "detail": p.detail,
            "schema_status": p.schema_status,
            "cc_enabled": p.cc_enabled,
            "cc_ready": p.cc_ready,
            "gpus": [
                {
                    **asdict(s.device),
                    "bdf": str(s.bdf) if s.bdf else None,
                    "host_bdf": str(s.host.bdf) if s.host else None,
                    "host_bdf_source": s.host.source if s.host else None,
                    "sampled_at_ms": s.sampled_at_ms,
                }
                for s in p.samples
            ]
            if cards_known(p)
            else None,
        }
        for p in polled.polls
    ]
    unaskable = [{"vmm": vmm, **asdict(vm)} for vmm, vm in polled.unaskable]
    return dumps({"cvms": cvms, "vms_unaskable": unaskable, "vmms_unreachable": dict(polled.failures)}, indent=2)


def main() -> None:
    service.run_cli(cli)


if __name__ == "__main__":
    main()
