"""What the HTTP API asks of the database, as SQL that both kinds understand. Nothing here writes.

Each query takes the Scope of who asks: what a scope hides is hidden here, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Boolean, TextClause, TextualSelect, text

from aggregator.views import HOT_ROWS, view_queries
from gpuwire.access import Scope

# A stay's stored end lags by up to a minute, and may for ever where the program was killed.
STAY_LAG_MS = 10 * 60_000
_IDENTITY = ("vmm", "vm_id", "vm_name", "app_id", "instance_id")
_CVM_COLUMNS = ", ".join(f"cvm.{name}" for name in _IDENTITY)
_STRETCH_COLUMNS = "s.outcome, s.detail, s.schema_status, s.cc_enabled, s.cc_ready, s.since_ms, s.until_ms"
_STAY_COLUMNS = f"{_CVM_COLUMNS}, card.uuid, t.bdf, t.host_bdf, t.host_bdf_source"
# `kept_under` is the card itself, or a place whose card became known.
_STAYS = """tenancy AS t
    JOIN cvm ON cvm.cvm_id = t.cvm_id
    JOIN gpu AS kept_under ON kept_under.gpu_id = t.gpu_id
    JOIN gpu AS card ON card.gpu_id = kept_under.card_id"""


class Where:
    """Conditions that must all hold, the scope's first. What a caller gave stands in `values`, never in the SQL."""

    def __init__(self, scope: Scope, app_id: str = "cvm.app_id") -> None:
        self.values: dict[str, Any] = {}
        self._conditions: list[str] = []
        if scope.apps is not None:
            self.among(app_id, "scope", sorted(scope.apps))

    def __str__(self) -> str:
        return " AND ".join(self._conditions) or "1 = 1"

    def add(self, condition: str, **values: Any) -> Where:
        self._conditions.append(condition)
        self.values.update(values)
        return self

    def equal(self, table: str, filters: Mapping[str, Any]) -> Where:
        """Those that are given."""
        for name, value in filters.items():
            if value is not None:
                self.add(f"{table}.{name} = :{name}", **{name: value})
        return self

    def among(self, column: str, name: str, values: Sequence[Any]) -> Where:
        given = {f"{name}_{number}": value for number, value in enumerate(values)}
        return self.add(f"{column} IN ({', '.join(f':{key}' for key in given)})", **given)

    def within(self, start_ms: int, end_ms: int) -> Where:
        """Stays that may have samples in that time."""
        return self.add(
            "t.last_seen_ms >= :seen_from AND t.first_seen_ms < :seen_to",
            seen_from=start_ms - STAY_LAG_MS,
            seen_to=end_ms + STAY_LAG_MS,
        )

    def of(self, sql: str, **values: Any) -> TextClause:
        """`sql` with all values bound."""
        return text(sql).bindparams(**self.values, **values)


def latest_page(
    dialect: str, scope: Scope, filters: Mapping[str, Any], after: tuple[str | int, ...] | None, limit: int
) -> TextualSelect:
    """Rows of v_gpu_latest, their gpu_id, and when the card was first and last seen by who asks; by uuid, those without first.

    A page begins behind the key of the last entry of the one before, (uuid, gpu_id): nothing else of a card stays as it is
    while pages are read.
    """
    # Two stays of a place without uuid have all columns of the view alike.
    view = view_queries(dialect)["v_gpu_latest"].replace("SELECT", "SELECT s.gpu_id,", 1)
    where = Where(scope, "latest.app_id").equal("latest", filters)
    if after is not None:
        where.add(
            "(coalesce(latest.uuid, ''), latest.gpu_id) > (:after_uuid, :after_id)", after_uuid=after[0], after_id=after[1]
        )
    stays = f"FROM tenancy AS t JOIN cvm ON cvm.cvm_id = t.cvm_id WHERE t.gpu_id = latest.gpu_id AND {Where(scope)}"
    return where.of(
        f"""
        SELECT latest.*, (SELECT min(t.first_seen_ms) {stays}) AS first_seen_ms,
            (SELECT max(t.last_seen_ms) {stays}) AS last_seen_ms
        FROM ({view}) AS latest WHERE {where}
        ORDER BY coalesce(latest.uuid, ''), latest.gpu_id LIMIT :limit""",
        limit=limit,
    ).columns(cc_enabled=Boolean, cc_ready=Boolean)


# Columns of `latest_of_all`. A mean may be of rows of several numbers: of a card, and of the places that became it.
LATEST_OF_ALL = (
    "card_id",
    *("vmm", "vm_id", "app_id", "uuid", "bdf", "host_bdf", "host_bdf_source", "model", "state", "sampled_at_ms"),
    *("utilization_gpu", "memory_used_bytes", "memory_total_bytes", "temperature_c", "power_usage_mw", "query_errors"),
)


def latest_of_all(dialect: str, scope: Scope) -> TextClause:
    """LATEST_OF_ALL of every card, by VMM, CVM and host address."""
    view = view_queries(dialect)["v_gpu_latest"].replace("SELECT", "SELECT kept_under.card_id,", 1)
    where = Where(scope, "latest.app_id")
    return where.of(f"""
        SELECT {", ".join(f"latest.{name}" for name in LATEST_OF_ALL)} FROM ({view}) AS latest WHERE {where}
        ORDER BY latest.vmm, latest.vm_id, latest.host_bdf, latest.bdf, latest.card_id""")


def numbers_of_cards(where: Where) -> str:
    """SELECT of gpu_id and card_id of those with such stays; its values are bound by `where`."""
    return f"SELECT DISTINCT t.gpu_id, kept_under.card_id FROM {_STAYS} WHERE {where}"


def numbers_of_stays(where: Where) -> str:
    return f"SELECT t.tenancy_id FROM {_STAYS} WHERE {where}"


def cvms_now(scope: Scope, since_ms: int) -> TextualSelect:
    """CVMs that were polled since then or have a card, with their latest stretch; by VMM, name and id."""
    where = Where(scope).add("(s.until_ms >= :since OR cards.gpus > 0)", since=since_ms)
    return where.of(f"""
        SELECT {_CVM_COLUMNS}, {_STRETCH_COLUMNS}, coalesce(cards.gpus, 0) AS gpus
        FROM cvm LEFT JOIN cvm_state AS s ON s.state_id = cvm.state_id
        LEFT JOIN (
            SELECT t.cvm_id, count(*) AS gpus FROM gpu_latest AS g
            JOIN tenancy AS t ON t.gpu_id = g.gpu_id AND t.tenancy_id = g.tenancy_id GROUP BY t.cvm_id
        ) AS cards ON cards.cvm_id = cvm.cvm_id
        WHERE {where} ORDER BY cvm.vmm, coalesce(cvm.vm_name, cvm.vm_id), cvm.vm_id""").columns(
        cc_enabled=Boolean, cc_ready=Boolean
    )


def cvm_page(scope: Scope, filters: Mapping[str, Any], after: tuple[str | int, ...] | None, limit: int) -> TextualSelect:
    """CVMs by VMM and id, with their latest stretch. An id that was given to another app is another CVM."""
    where = Where(scope).equal("cvm", filters)
    if after is not None:
        key = dict(zip(("after_vmm", "after_vm_id", "after_cvm_id"), after, strict=True))
        where.add("(cvm.vmm, cvm.vm_id, cvm.cvm_id) > (:after_vmm, :after_vm_id, :after_cvm_id)", **key)
    return where.of(
        f"""
        SELECT cvm.cvm_id, {_CVM_COLUMNS}, {_STRETCH_COLUMNS},
            (SELECT count(*) FROM tenancy AS t JOIN gpu_latest AS g ON g.gpu_id = t.gpu_id AND g.tenancy_id = t.tenancy_id
             WHERE t.cvm_id = cvm.cvm_id) AS gpus
        FROM cvm LEFT JOIN cvm_state AS s ON s.state_id = cvm.state_id
        WHERE {where} ORDER BY cvm.vmm, cvm.vm_id, cvm.cvm_id LIMIT :limit""",
        limit=limit,
    ).columns(cc_enabled=Boolean, cc_ready=Boolean)


def stretches(scope: Scope, cvm_id: int, limit: int) -> TextualSelect:
    """Of one CVM, newest first."""
    where = Where(scope).equal("cvm", {"cvm_id": cvm_id})
    return where.of(
        f"""
        SELECT {_STRETCH_COLUMNS}
        FROM cvm JOIN cvm_state AS s ON s.cvm_id = cvm.cvm_id
        WHERE {where} ORDER BY s.since_ms DESC, s.state_id DESC LIMIT :limit""",
        limit=limit,
    ).columns(cc_enabled=Boolean, cc_ready=Boolean)


def stays(where: Where) -> TextClause:
    """tenancy_id, gpu_id, first and last time, whether the stay is the card's own and not part of one, and what a stay says;
    newest first. `where` may name t, cvm, kept_under and card."""
    return where.of(f"""
        SELECT t.tenancy_id, t.gpu_id, t.first_seen_ms, t.last_seen_ms, kept_under.card_id = t.gpu_id AS own, {_STAY_COLUMNS}
        FROM {_STAYS} WHERE {where} ORDER BY t.first_seen_ms DESC, t.tenancy_id DESC""")


def cards_after(where: Where, card_id: int, limit: int) -> TextClause:
    """Numbers of cards with such stays, above `card_id`."""
    return where.of(
        f"""
        SELECT DISTINCT kept_under.card_id FROM {_STAYS}
        WHERE {where} AND kept_under.card_id > :after_card ORDER BY kept_under.card_id LIMIT :limit""",
        after_card=card_id,
        limit=limit,
    )


def stays_of_cards(where: Where, card_ids: Sequence[int]) -> TextClause:
    """card_id, gpu_id, tenancy_id, and of a sample in such a stay what does not stand in its row."""
    return where.of(f"""
        SELECT kept_under.card_id, t.gpu_id, t.tenancy_id, t.pci_bus_id, {_STAY_COLUMNS}
        FROM {_STAYS} WHERE {where} AND kept_under.card_id IN ({_numbers(card_ids)})""")


def sample_sources(dialect: str) -> tuple[str, ...]:
    """Where samples lie, to stand behind FROM: each is in one of them."""
    hot = (f"(SELECT * FROM gpu_sample_hot AS s {HOT_ROWS})",) if dialect == "sqlite" else ()
    return ("gpu_sample", *hot)


def rows_of(gpu_ids: Sequence[int], tenancy_ids: Sequence[int] | None) -> str:
    """A condition on `s`: these cards, and of these only these stays."""
    stays = "" if tenancy_ids is None else f" AND s.tenancy_id IN ({_numbers(tenancy_ids)})"
    return f"s.gpu_id IN ({_numbers(gpu_ids)}){stays}"


def cards_by_state(dialect: str, scope: Scope) -> TextClause:
    """state, cards, and of their latest samples the sums of memory and power."""
    where = Where(scope, "latest.app_id")
    sums = ", ".join(
        f"CAST(sum(latest.{name}) AS bigint)" for name in ("memory_total_bytes", "memory_used_bytes", "power_usage_mw")
    )
    view = view_queries(dialect)["v_gpu_latest"]
    return where.of(f"SELECT latest.state, count(*), {sums} FROM ({view}) AS latest WHERE {where} GROUP BY latest.state")


def cvms_by_outcome(scope: Scope, since_ms: int) -> TextClause:
    """outcome, CVMs, and how many of these are not ready for confidential computing; those confirmed since."""
    where = Where(scope).add("s.until_ms >= :since", since=since_ms)
    return where.of(f"""
        SELECT s.outcome, count(*), count(CASE WHEN NOT s.cc_ready THEN 1 END)
        FROM cvm JOIN cvm_state AS s ON s.state_id = cvm.state_id WHERE {where} GROUP BY s.outcome""")


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(str(int(value)) for value in values)
