"""What a Prometheus beside the demo is given: the shipped rules, in the demo's time, and the demo's pages to scrape. Pure."""

from __future__ import annotations

import json
import re

# An alert waits for as much less: minutes are long where a day passes in ten.
HURRY = 10
EVERY = "5s"
RULES_FILE = "gpu-fleet.rules.yml"
_UNIT_S = {"s": 1, "m": 60, "h": 3600}


def hurried(rules: str) -> str:
    """Rules whose alerts fire after a tenth of the time that they are written to wait."""

    def shorter(wait: re.Match[str]) -> str:
        return f"{wait[1]}{int(wait[2]) * _UNIT_S[wait[3]] // HURRY}s"

    return re.sub(r"^( +for: )(\d+)([smh])$", shorter, rules, flags=re.MULTILINE)


def configuration(*, aggregator: str, proxy: str) -> str:
    """A prometheus.yml (JSON is YAML) for the two addresses; the jobs' names are those that the rules select by."""
    return json.dumps(
        {
            "global": {"scrape_interval": EVERY, "evaluation_interval": EVERY},
            "rule_files": [RULES_FILE],
            "scrape_configs": [
                {"job_name": "gpu-aggregator", "static_configs": [{"targets": [aggregator]}]},
                {"job_name": "gpu-host-proxy", "static_configs": [{"targets": [proxy]}]},
            ],
        },
        indent=2,
    )
