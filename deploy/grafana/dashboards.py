"""Which dashboards there are. Who uses them reads only what `make golden` makes of this, in provisioning/dashboards; each is a
value of fleet.py's questions in panels.py's shapes."""

from __future__ import annotations

from pathlib import Path

from deploy.grafana.aggregator_dashboard import aggregator
from deploy.grafana.card_dashboard import card
from deploy.grafana.cvm_dashboard import cvm
from deploy.grafana.fleet_dashboard import fleet
from deploy.grafana.host_dashboard import host
from deploy.grafana.panels import written

FOLDER = Path(__file__).parent / "provisioning/dashboards"
DASHBOARDS = {"gpu-fleet": fleet, "gpu-host": host, "gpu-cvm": cvm, "gpu-card": card, "gpu-aggregator": aggregator}


def file_of(uid: str) -> Path:
    return FOLDER / f"{uid}.json"


def text_of(uid: str) -> str:
    """What is in that file."""
    return written(DASHBOARDS[uid]()) + "\n"
