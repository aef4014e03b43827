"""Adding a field: GpuDevice has it first, and each test here names who lags behind."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from sqlalchemy import BigInteger, Column, Integer, SmallInteger, Table

from aggregator import tables
from aggregator.spans import ERROR_KINDS
from gpuwire.device import GAUGES, Gauge, GpuDevice, GpuSnapshot
from gpuwire.pb import guest_api_pb2
from guest_agent import collector

DEVICE: Any = guest_api_pb2.GpuDevice.DESCRIPTOR
RESPONSE: Any = guest_api_pb2.GpuInfoResponse.DESCRIPTOR
GAUGE_NAMES = [gauge.name for gauge in GAUGES]
BY_NAME = {gauge.name: gauge for gauge in GAUGES}
KEY_COLUMNS = {"gpu_id", "sampled_at_ms", "tenancy_id", "polled_at_ms", "gpu_index", "query_errors"}
ROOM: dict[type, int] = {SmallInteger: 2**15, Integer: 2**31, BigInteger: 2**63}


def agree(left: str, left_names: set[str], right: str, right_names: set[str]) -> None:
    """Fails with the names that one of two sides lacks."""
    lagging = [
        f"{side} lacks {', '.join(sorted(missing))}"
        for side, missing in ((right, left_names - right_names), (left, right_names - left_names))
        if missing
    ]
    assert not lagging, "; ".join(lagging)


def optional_scalars(message: Any) -> set[str]:
    return {f.name for f in message.fields if f.has_presence and f.type != FieldDescriptor.TYPE_MESSAGE}


def test_device_and_proto_have_the_same_fields() -> None:
    agree(
        "gpuwire/device.py: GpuDevice",
        {field.name for field in fields(GpuDevice)},
        "guest_api.proto: GpuDevice",
        {field.name for field in DEVICE.fields},
    )
    agree(
        "gpuwire/device.py: GpuSnapshot",
        {field.name for field in fields(GpuSnapshot)},
        "guest_api.proto: GpuInfoResponse",
        {field.name for field in RESPONSE.fields},
    )


def test_gauges_are_the_optional_scalars_of_the_proto() -> None:
    agree("gpuwire/device.py: gauges", set(GAUGE_NAMES), "guest_api.proto: optional fields", optional_scalars(DEVICE))


@pytest.mark.parametrize("gauge", GAUGES, ids=lambda gauge: gauge.name)
def test_the_proto_has_room_for_the_bound(gauge: Gauge) -> None:
    bits = {FieldDescriptor.TYPE_UINT32: 32, FieldDescriptor.TYPE_UINT64: 64}[DEVICE.fields_by_name[gauge.name].type]
    assert gauge.upper < 2**bits


def test_the_collector_reads_every_field() -> None:
    read = [name for _, names, _ in collector.READERS for name in names]
    assert len(read) == len(set(read)), "guest_agent/collector.py: READERS fill a field twice"
    agree(
        "gpuwire/device.py: GpuDevice",
        {field.name for field in fields(GpuDevice)} - {"index", "errors"},
        "guest_agent/collector.py: READERS",
        set(read),
    )


def test_every_query_of_the_collector_is_a_kind_of_failure() -> None:
    queries = {"device", *(query for query, _, _ in collector.READERS)}
    agree("guest_agent/collector.py: READERS", queries, "aggregator/spans.py: ERROR_KINDS", set(ERROR_KINDS) - {"other"})


def test_the_collector_has_the_bounds_of_the_definition() -> None:
    agree("gpuwire/device.py: gauges", set(GAUGE_NAMES), "guest_agent/collector.py: UPPER", set(collector.UPPER))
    assert {gauge.name: gauge.upper for gauge in GAUGES} == collector.UPPER


def test_the_collector_calls_what_the_definition_names_as_source() -> None:
    for _, names, read in collector.READERS:
        called = {constant for constant in read.__code__.co_consts if isinstance(constant, str)}
        for name in names:
            if name in BY_NAME:
                assert BY_NAME[name].source in called, f"{name}: {read.__name__} does not call {BY_NAME[name].source}"


@pytest.mark.parametrize("table", [tables.gpu_sample, tables.gpu_latest], ids=lambda table: table.name)
def test_every_gauge_is_a_column_and_nothing_else_is(table: Table) -> None:
    columns = {column.name for column in table.columns} - KEY_COLUMNS
    agree("gpuwire/device.py: gauges", set(GAUGE_NAMES), f"aggregator/tables.py: {table.name}", columns)


@pytest.mark.parametrize("table", [tables.gpu_sample, tables.gpu_latest], ids=lambda table: table.name)
@pytest.mark.parametrize("gauge", GAUGES, ids=lambda gauge: gauge.name)
def test_a_column_holds_its_gauge_and_null(table: Table, gauge: Gauge) -> None:
    column: Column[Any] = table.columns[gauge.name]
    assert column.nullable
    assert gauge.upper < ROOM[type(column.type)]
