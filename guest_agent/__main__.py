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

FILE = click.Path(dir_okay=False, path_type=Path)


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
    "--external",
    type=service.ADDRESS,
    default="0.0.0.0:8090",
    show_default=True,
    help="Where /metrics and the dashboard are served.",
)
@click.option(
    "--app-compose",
    type=FILE,
    default="/dstack/.host-shared/app-compose.json",
    show_default=True,
    help="JSON whose public_sysinfo says whether system and GPU figures are shown on the external port.",
)
@click.option(
    "--instance-info",
    type=FILE,
    default="/dstack/.host-shared/.instance_info",
    show_default=True,
    help="JSON with app_id and instance_id in hex.",
)
@click.option(
    "--data-disk",
    type=service.PathParam(path_type=Path),
    multiple=True,
    default=["/"],
    show_default=True,
    help="Mount point whose size and free space SysInfo gives; may be repeated.",
)
@click.option(
    "--docker-socket",
    type=FILE,
    default="/var/run/docker.sock",
    show_default=True,
    help="Docker's API socket, for ListContainers.",
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
@click.option("--allow-shutdown", is_flag=True, help="Let the host power this VM off by the Shutdown call.")
def serve_command(**flags: Any) -> None:
    """Serve the guest API, /metrics and the dashboard."""
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
