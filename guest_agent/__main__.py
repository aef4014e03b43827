"""The command line of gpu-guest-agent."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from gpuwire import service
from guest_agent import collector
from guest_agent.app import serve
from guest_agent.settings import Settings


@click.group()
@click.version_option(package_name="cvm-gpu-telemetry")
def cli() -> None:
    """Tells the host what the NVIDIA cards in this confidential VM do."""


def _command_line(ctx: click.Context, param: click.Parameter, value: str) -> str:
    try:
        shlex.split(value)
    except ValueError as error:
        raise click.BadParameter(f"{value!r}: {error}", ctx, param) from None
    return value


@service.command(cli, "serve", env="GUEST_AGENT")
@click.option(
    "--guest-api", type=service.ADDRESS, default="vsock:any:8000", show_default=True, help="Where the guest API listens."
)
@click.option(
    "--sysfs-root",
    type=click.Path(file_okay=False, path_type=Path),
    default="/sys",
    show_default=True,
    help="Where sysfs is mounted.",
)
@click.option(
    "--collector",
    default="",
    callback=_command_line,
    help="Command that prints one sample, split as a shell would split it.  [default: the packaged collector]",
)
@click.option(
    "--sample-ttl", type=service.SECONDS, default=5, show_default=True, help="Age at which a sample is renewed on request."
)
@click.option("--failure-backoff", type=service.SECONDS, default=30, show_default=True, help="The same after a failed sample.")
@click.option(
    "--sample-timeout", type=service.SECONDS, default=10, show_default=True, help="Time after which a collector is ended."
)
@click.option(
    "--rpc-deadline",
    type=service.SECONDS,
    default=5,
    show_default=True,
    help="Longest wait of a GpuInfo call for the first sample.",
)
def serve_command(**flags: Any) -> None:
    """Serve the guest API."""
    settings = Settings(**flags)
    service.run(lambda stop: serve(settings, stop))


@cli.command("gpu-info")
@click.option("--pretty", is_flag=True, help="Print a table for people instead of JSON.")
def gpu_info(pretty: bool) -> None:
    """Print one sample of this machine's cards, as one line of JSON."""
    sys.exit(collector.main(["--pretty"] if pretty else []))


def main() -> None:
    service.run_cli(cli)


if __name__ == "__main__":
    main()
