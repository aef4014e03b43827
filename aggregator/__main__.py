"""The command line of gpu-aggregator."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from json import dumps
from pathlib import Path
from typing import Any, TypeVar

import click

from aggregator.app import known_cards, serve
from aggregator.calls import Slots
from aggregator.errors import DatabaseAway, Unstorable
from aggregator.fleet import Registered
from aggregator.identity import Identity
from aggregator.metrics import SelfMetrics
from aggregator.outcome import ANSWERED, VMM_UNREACHABLE
from aggregator.poller import Poller, Shared, poll_once
from aggregator.rows import Poll
from aggregator.settings import DEFAULT_INTERVAL_S, PollSettings, Settings, Vmm, parse_vmm
from aggregator.store import Store
from aggregator.vmm_client import VmmConnections
from gpuwire import service
from gpuwire.display import aligned
from gpuwire.errors import NotRunning, StartError
from gpuwire.schema import Unversioned

F = TypeVar("F", bound=Callable[..., None])
MIN_STALE_AFTER_S = 120.0
STALE_MARGIN_S = 10.0
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class VmmParam(click.ParamType):  # type: ignore[type-arg]
    name = "[NAME=]ADDR[#token-file=FILE]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return parse_vmm(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


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
    help="Time between two polls of a CVM.",
)
@click.option(
    "--stale-after", type=service.SECONDS, help="Age at which a sample is stale.  [default: 120, or 3 intervals if longer]"
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
    if stale_after is None:
        stale_after = max(MIN_STALE_AFTER_S, 3 * interval)
    elif stale_after < interval + STALE_MARGIN_S:
        raise click.UsageError(
            f"--stale-after {stale_after:g} is too short: at least the interval + {STALE_MARGIN_S:g} s = "
            f"{interval + STALE_MARGIN_S:g}, or every sample would be stale"
        )
    tls = service.tls_files(flags.pop("tls_cert"), flags.pop("tls_key"))
    own = {name: flags.pop(name) for name in ("db", "listen", "upgrade", "notice", "spool", "token_file")}
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
    polls, failures = service.run(lambda _stop: poll_and_store(db, poll_settings(**poll)))
    click.echo(poll_json(polls, failures) if json else poll_table(polls, failures))
    answered = all(poll.outcome in ANSWERED or poll.outcome == NotRunning.word for poll in polls)
    sys.exit(0 if answered and not failures else 1)


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


def poll_settings(vmm: tuple[Vmm, ...], discover: bool, **rest: Any) -> PollSettings:
    if not vmm and not discover:
        raise click.UsageError("Missing option '--vmm': name a VMM to poll, or give --discover")
    if twice := [name for name, count in Counter(v.name for v in vmm).items() if count > 1]:
        raise click.UsageError(f"--vmm: the name {twice[0]!r} is used twice")
    return PollSettings(vmms=vmm, discover=discover, **rest)


async def poll_and_store(db: str, settings: PollSettings) -> tuple[list[Poll], dict[str, str]]:
    if settings.discover:
        settings = replace(settings, vmms=(*settings.vmms, *Registered(settings.vmms).find()))
    with closing(Store(db)) as store:
        store.require_current()
        identity = Identity(DEFAULT_INTERVAL_S)
        identity.remember(known_cards(store), time.time_ns() // 1_000_000, grace=False)
        connections = VmmConnections()
        slots = Slots(settings.concurrency, settings.timeout)
        shared = Shared(settings, connections, slots, identity, SelfMetrics())
        polls, failures = await poll_once([Poller(vmm, shared) for vmm in settings.vmms], identity)
        await connections.close()
        try:
            store.write(polls)
        except (DatabaseAway, Unstorable) as error:
            raise StartError(str(error)) from None
    return polls, failures


def poll_table(polls: Sequence[Poll], failures: Mapping[str, str]) -> str:
    """A line a CVM, aligned, then a line a VMM that could not be listed."""
    rows = [("VMM", "VM", "NAME", "OUTCOME", "GPUS", "DETAIL")]
    rows += [
        (p.cvm.vmm, p.cvm.vm_id, p.cvm.vm_name, p.outcome, str(len(p.samples)), p.detail)
        for p in sorted(polls, key=lambda p: (p.cvm.vmm, p.cvm.vm_id))
    ]
    rows += [(name, "-", "-", VMM_UNREACHABLE, "-", reason) for name, reason in failures.items()]
    return aligned(rows)


def poll_json(polls: Sequence[Poll], failures: Mapping[str, str]) -> str:
    """One object: `cvms`, an entry a CVM, and `vmms_unreachable`, by name why."""
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
            ],
        }
        for p in polls
    ]
    return dumps({"cvms": cvms, "vmms_unreachable": dict(failures)}, indent=2)


def main() -> None:
    service.run_cli(cli)


if __name__ == "__main__":
    main()
