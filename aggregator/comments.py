"""What the views and their columns say: for docs/views.md, and for PostgreSQL, which shows it to whoever looks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from aggregator.tables import UTILIZATION_BINS, UTILIZATION_BOUNDS
from gpuwire.device import GAUGES

VIEWS = {
    "v_gpu_samples": "One sample: a card at one instant, as its guest measured it.",
    "v_gpu_latest": "The latest sample of each card, and how the card is now.",
    "v_gpu_tenancy": "One stay of a card in one place of a CVM.",
    "v_cvm_state": "One stretch of time in which polling a CVM came to the same. Time in which nobody polled lies in none.",
    "v_gpu_5m": "What the samples of a card in a CVM come to in 5 minutes; of time that is rolled up, up to an hour late.",
    "v_gpu_1h": "What the samples of a card in a CVM come to in an hour; of time that is rolled up, up to two hours late.",
}
_BUCKETS = ("v_gpu_5m", "v_gpu_1h")
_COLUMNS = {
    "vmm": "Name of the VMM that runs the CVM, as given to --vmm.",
    "vm_id": "Id of the CVM at its VMM; two VMMs may have the same.",
    "vm_name": "Name of the CVM at its VMM.",
    "app_id": "Id of the app that the CVM is an instance of.",
    "instance_id": "Id of the instance.",
    "uuid": "The card, wherever it is; NULL while it is known by its place only.",
    "gpu_index": "Its number in the guest at that time; it may change.",
    "pci_bus_id": "PCI address in the guest, as NVML gave it.",
    "bdf": "PCI address in the guest, as sysfs writes it: 0000:01:00.0.",
    "host_bdf": "PCI address on the host, as sysfs writes it; NULL where it is not known.",
    "host_bdf_source": "How host_bdf is known, surest first: declared, qmp, topology, single or order.",
    "sampled_at": "When it was measured, by the aggregator's clock.",
    "sampled_at_ms": "The same in milliseconds since 1970, UTC.",
    "polled_at_ms": "When it came, in milliseconds since 1970, UTC.",
    "query_errors": "How many queries of the card failed.",
    "model": "The host's word for the card.",
    "cc_enabled": "Whether confidential computing is on; NULL where the guest does not say.",
    "cc_ready": "Whether the cards are ready for it; NULL where the guest does not say.",
    "state": "ok; stale: its newest sample is old; silent: its CVM does not answer; contested: another CVM has the card that"
    " this one claims; detached: its CVM has answered without it for longer than --stale-after, or has no card.",
    "first_seen": "First sample there.",
    "last_seen": "Last poll that found it there; may lag by a minute.",
    "outcome": "ok, no_gpu, contested, nvml_error, schema_mismatch, unreachable, timeout, bad_reply, not_running or"
    " vmm_unreachable.",
    "detail": "The reason, for people.",
    "schema_status": "How the guest's schema compares with ours: match, older, newer, drift, unversioned or unchecked.",
    "since": "First poll of the stretch.",
    "until": "Last poll of the stretch; may lag by a minute.",
    "bucket": "Beginning of the bucket, UTC.",
    "bucket_ms": "The same in milliseconds since 1970.",
    "samples": "How many samples there are in it.",
    "covered_ms": "For how long they speak: each for the time since the one before, at most until a card without news is"
    " stale.",
    "energy_uj": "Power over that time, in microjoules: 3.6e12 are a kWh. NULL where no power was read.",
}
_OF_BUCKETS = {"query_errors": "How many queries of the card failed, of all samples together."}
_FIGURES = {
    "avg": "mean of the samples",
    "min": "least of the samples",
    "max": "largest of the samples",
    "last": "of the last sample",
}


def column_comment(view: str, column: str) -> str | None:
    """None for a column that is not ours."""
    of_buckets = _OF_BUCKETS if view in _BUCKETS else {}
    return of_buckets.get(column) or _COLUMNS.get(column) or _OF_GAUGES.get(column)


def _of_gauges() -> dict[str, str]:
    said = {}
    for gauge in GAUGES:
        said[gauge.name] = f"{gauge.help} In {gauge.unit}; NULL where the card did not say."
        for figure, words in _FIGURES.items():
            said[f"{gauge.name}_{figure}"] = f"{gauge.help} In {gauge.unit}; {words}."
    for name, bound, below in zip(UTILIZATION_BINS, UTILIZATION_BOUNDS, (None, *UTILIZATION_BOUNDS), strict=False):
        which = "of 0 %" if below is None else f"above {below} and up to {bound} %"
        said[name] = f"Time at a utilization_gpu {which}, in milliseconds; NULL for none."
    return said


_OF_GAUGES = _of_gauges()


def comments(columns: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Statements for PostgreSQL; `columns` are those of each view."""
    for view, names in columns.items():
        yield f"COMMENT ON VIEW {view} IS {_quoted(VIEWS[view])}"
        for name in names:
            if words := column_comment(view, name):
                yield f"COMMENT ON COLUMN {view}.{name} IS {_quoted(words)}"


def _quoted(words: str) -> str:
    return "'" + words.replace("'", "''") + "'"
