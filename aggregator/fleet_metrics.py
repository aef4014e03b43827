"""The fleet's part of /metrics: what the database knows of cards and CVMs now, under the names that the guests' own pages use
and a few more.

Rows become text without a database or a clock; FleetMetrics is the edge that asks. The text is written here, in a tenth of the
time that prometheus_client takes: a card's labels are escaped once, not for each of its series. Nothing in it is an age: a time
stays true while nobody asks.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from aggregator.outcome import ANSWERED, NO_GPU, NVML_ERROR
from aggregator.poller import HOUR_S
from aggregator.settings import CARD_KEPT_S
from aggregator.store import Store
from aggregator.threads import in_thread
from aggregator.turns import MAX_BACKOFF_S
from aggregator.writer import Writer
from gpuwire.device import GAUGES
from gpuwire.errors import TelemetryError
from gpuwire.metrics import CC_ENABLED, CC_READY, NVML_UP, QUERY_ERRORS, name_of

log = logging.getLogger(__name__)

# Columns of the rows, and the names of their labels.
CVM_LABELS = {"vmm": "vmm", "vm_id": "vm_id", "vm_name": "vm_name", "app_id": "app_id"}
CARD_LABELS = {**CVM_LABELS, "gpu_index": "index", "uuid": "uuid", "pci_bus_id": "pci_bus_id", "host_bdf": "host_bdf"}
MEASURED = ("ok", "contested")
LIMIT_S = 2.0
THREAD = "fleet metrics"

_Row = Mapping[str, Any]
# Label sets as they are written, and their values.
_Series = Iterable[tuple[str, float | None]]


def fleet_page(cards: Iterable[_Row], cvms: Iterable[_Row], *, now_ms: int, stale_after_s: float) -> bytes:
    """`cards` are rows of v_gpu_latest, `cvms` those of Store.cvms. A CVM counts while its next poll is not overdue by
    `stale_after_s`, a card while its CVM does and it has given a sample within CARD_KEPT_S; of a card without news there is
    only its state. The text is good for Prometheus' own format and for OpenMetrics, gauges being alike in both."""
    current = [row for row in cvms if _is_current(row, now_ms, stale_after_s)]
    labelled = [(_labels(row, CVM_LABELS), row) for row in current]
    of_current = {_key(row) for row in current}
    answered = [(labels, row) for labels, row in labelled if row["outcome"] in ANSWERED]
    kept_from_ms = now_ms - CARD_KEPT_S * 1000
    # No label set twice: it would spoil the whole page.
    there = {
        _labels(row, CARD_LABELS): row for row in cards if _key(row) in of_current and row["sampled_at_ms"] >= kept_from_ms
    }
    measured = [(labels, row) for labels, row in there.items() if row["state"] in MEASURED]
    parts = [
        _family(*NVML_UP, [(labels, row["outcome"] != NVML_ERROR) for labels, row in answered]),
        _family(*CC_READY, [(labels, row["cc_ready"]) for labels, row in answered]),
        _family(*CC_ENABLED, [(labels, row["cc_enabled"]) for labels, row in answered]),
        *(_family(name_of(gauge), gauge.help, [(labels, row[gauge.name]) for labels, row in measured]) for gauge in GAUGES),
        _family(*QUERY_ERRORS, [(labels, row["query_errors"]) for labels, row in measured]),
        _family(
            "gpu_aggregator_card_sampled_timestamp_seconds",
            "When a card's values were measured.",
            [(labels, row["sampled_at_ms"] / 1000) for labels, row in measured],
        ),
        _words("gpu_aggregator_card_state", "1 for the state that a card is in.", "state", there.items()),
        _words("gpu_aggregator_cvm_outcome", "1 for the outcome of a CVM's last poll.", "outcome", labelled),
        _words("gpu_aggregator_cvm_schema_status", "1 for how its schema compares with ours.", "schema_status", labelled),
        _up(1),
    ]
    return "".join(parts).encode()


def missing_page() -> bytes:
    """Of a fleet that the database says nothing of, or nothing of today."""
    return _up(0).encode()


class FleetMetrics:
    """Reads the database when it is scraped, once for all who ask meanwhile, and waits for it at most LIMIT_S.

    While the database takes nothing, or is still being given what waited in the spool, it knows only the past: its CVMs would
    all seem silent. Then nothing is said of the fleet.
    """

    def __init__(self, store: Store, writer: Writer, stale_after_s: float) -> None:
        self._store = store
        self._writer = writer
        self._stale_after_s = stale_after_s
        self._reading: asyncio.Future[_Read | str] | None = None
        self._give_up_at = 0.0
        self._told = ""

    async def page(self) -> bytes:
        """The fleet's part of the page, without an end mark."""
        if self._writer.database_error or self._writer.spool_age_s > self._stale_after_s:
            return missing_page()
        now = asyncio.get_running_loop().time()
        if self._reading is None or self._reading.done():
            self._reading, self._give_up_at = in_thread(self._read, THREAD), now + LIMIT_S
        reading = self._reading
        await asyncio.wait({reading}, timeout=max(0.0, self._give_up_at - now))
        read = reading.result() if reading.done() else f"{self._store.name} took longer than {LIMIT_S:g} s"
        problem = read if isinstance(read, str) else ""
        if problem and problem != self._told:
            log.warning("fleet left out of /metrics: reason=%s", problem)
        self._told = problem
        if isinstance(read, str):
            return missing_page()
        cards, cvms, now_ms = read
        page = partial(fleet_page, cards, cvms, now_ms=now_ms, stale_after_s=self._stale_after_s)
        return await in_thread(page, THREAD)

    def _read(self) -> _Read | str:
        """The rows and when they were read; or why they cannot be."""
        now_ms = time.time_ns() // 1_000_000
        longest_wait_ms = round((self._stale_after_s + HOUR_S) * 1000)
        try:
            return self._store.latest(), self._store.cvms(now_ms - longest_wait_ms), now_ms
        except TelemetryError as error:
            return str(error)


_Read = tuple[list[dict[str, Any]], list[dict[str, Any]], int]


def _key(row: _Row) -> tuple[Any, ...]:
    """Of a CVM, or of a card's. An id that was given to another app is another CVM."""
    return row["vmm"], row["vm_id"], row["app_id"]


def _is_current(cvm: _Row, now_ms: int, stale_after_s: float) -> bool:
    """Its next poll may be an hour away where there are no cards, and five minutes where it does not answer."""
    if cvm["until_ms"] is None:
        return False
    wait_s = stale_after_s
    if cvm["outcome"] == NO_GPU or not cvm["gpus"]:
        wait_s += HOUR_S
    elif cvm["outcome"] not in ANSWERED:
        wait_s += MAX_BACKOFF_S
    return bool(now_ms - cvm["until_ms"] <= wait_s * 1000)


def _family(name: str, text: str, series: _Series) -> str:
    """None gives no series."""
    head = f"# HELP {name} {text}\n# TYPE {name} gauge\n"
    return head + "".join([f"{name}{labels} {float(value)}\n" for labels, value in series if value is not None])


def _words(name: str, text: str, column: str, rows: Iterable[tuple[str, _Row]]) -> str:
    return _family(
        name, text, [(f'{labels[:-1]},{column}="{_escape(row[column])}"}}', 1) for labels, row in rows if row[column]]
    )


def _up(value: int) -> str:
    return _family("gpu_aggregator_fleet_up", "1 while the fleet's series are on this page.", [("", value)])


def _labels(row: _Row, names: Mapping[str, str]) -> str:
    """Empty is, to Prometheus, as good as left out."""
    return "{" + ",".join([f'{label}="{_escape(row[column])}"' for column, label in names.items()]) + "}"


def _escape(value: str | int | None) -> str:
    if value is None:
        return ""
    return str(value).replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
