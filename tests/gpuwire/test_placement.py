"""Which attached card a reported one is: one table of what the host knows, what the guest says, what follows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpuwire.bdf import Bdf
from gpuwire.placement import AttachedCard, HostAddress, map_host_addresses


def card(host: str, source: str, guest: str = "") -> AttachedCard:
    return AttachedCard(Bdf.parse(host), Bdf.parse_or_none(guest), source)


ORDER = [card("19:00.0", "order"), card("3b:00.0", "order"), card("d8:00.0", "order")]
TOPOLOGY = [card("d8:00.0", "topology"), card("19:00.0", "topology")]
UNKNOWN_ORDER = [card("19:00.0", ""), card("3b:00.0", "")]
DECLARED = [card("d8:00.0", "declared", "01:00.0"), card("19:00.0", "declared", "02:00.0")]
QMP = [card("19:00.0", "qmp", "02:00.0"), card("d8:00.0", "qmp", "01:00.0")]


@pytest.mark.parametrize(
    ("attached", "reported", "expected"),
    [
        pytest.param(
            ORDER,
            ["01:00.0", "02:00.0", "03:00.0"],
            {"01:00.0": ("19:00.0", "order"), "02:00.0": ("3b:00.0", "order"), "03:00.0": ("d8:00.0", "order")},
            id="order",
        ),
        pytest.param(
            ORDER,
            ["03:00.0", "02:00.0", "01:00.0"],
            {"01:00.0": ("19:00.0", "order"), "02:00.0": ("3b:00.0", "order"), "03:00.0": ("d8:00.0", "order")},
            id="order-reported-backwards",
        ),
        pytest.param(ORDER, ["01:00.0", "03:00.0"], {}, id="order-with-one-missing"),
        pytest.param(ORDER, ["01:00.0", "02:00.0", "03:00.0", "04:00.0"], {}, id="order-with-one-too-many"),
        pytest.param(ORDER, ["01:00.0", "02:00.0", "02:00.0"], {}, id="order-with-one-named-twice"),
        pytest.param(ORDER, [], {}, id="order-of-none-reported"),
        pytest.param(
            TOPOLOGY,
            ["02:00.0", "01:00.0"],
            {"01:00.0": ("d8:00.0", "topology"), "02:00.0": ("19:00.0", "topology")},
            id="topology",
        ),
        pytest.param(TOPOLOGY, ["02:00.0"], {}, id="topology-with-one-missing"),
        pytest.param(UNKNOWN_ORDER, ["01:00.0", "02:00.0"], {}, id="no-known-order-as-with-hugepages"),
        pytest.param([card("19:00.0", "")], ["01:00.0"], {"01:00.0": ("19:00.0", "single")}, id="single-needs-no-order"),
        pytest.param([card("19:00.0", "order")], ["01:00.0"], {"01:00.0": ("19:00.0", "single")}, id="single"),
        pytest.param([card("19:00.0", "order")], ["01:00.0", "02:00.0"], {}, id="one-attached-two-reported"),
        pytest.param(
            [card("19:00.0", "declared", "01:00.0")], ["01:00.0"], {"01:00.0": ("19:00.0", "declared")}, id="one-declared"
        ),
        pytest.param(
            DECLARED,
            ["02:00.0", "01:00.0"],
            {"01:00.0": ("d8:00.0", "declared"), "02:00.0": ("19:00.0", "declared")},
            id="declared",
        ),
        pytest.param(DECLARED, ["02:00.0"], {"02:00.0": ("19:00.0", "declared")}, id="declared-with-one-missing"),
        pytest.param(
            DECLARED,
            ["01:00.0", "07:00.0"],
            {"01:00.0": ("d8:00.0", "declared")},
            id="declared-says-nothing-of-another-address",
        ),
        pytest.param(
            QMP,
            ["01:00.0", "02:00.0"],
            {"01:00.0": ("d8:00.0", "qmp"), "02:00.0": ("19:00.0", "qmp")},
            id="qmp-listed-in-any-order",
        ),
        pytest.param(
            DECLARED,
            ["10000:01:00.0", "02:00.0"],
            {"02:00.0": ("19:00.0", "declared")},
            id="another-domain-is-another-address",
        ),
        pytest.param(
            [card("19:00.0", "order", "01:00.0"), card("3b:00.0", "order", "02:00.0")], ["01:00.0"], {},
            id="an-address-from-an-inexact-source-is-not-exact",
        ),
        pytest.param([], ["01:00.0"], {}, id="none-attached"),
        pytest.param([], [], {}, id="nothing-at-all"),
    ],
)  # fmt: skip
def test_a_host_address_is_told_only_where_it_is_known(
    attached: Sequence[AttachedCard], reported: Sequence[str], expected: dict[str, tuple[str, str]]
) -> None:
    found = map_host_addresses(attached, [Bdf.parse(text) for text in reported])
    assert found == {Bdf.parse(guest): HostAddress(Bdf.parse(host), source) for guest, (host, source) in expected.items()}
