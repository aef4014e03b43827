"""PCI addresses: field cases P1 to P5, and that no text is ever split wrongly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwire.bdf import Bdf

ADDRESSES = st.builds(
    Bdf,
    domain=st.integers(0, 0xFFFFFFFF),
    bus=st.integers(0, 0xFF),
    device=st.integers(0, 0x1F),
    function=st.integers(0, 7),
)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        pytest.param("00000000:D8:00.0", "0000:d8:00.0", id="P1-nvml"),
        pytest.param("0000:D8:00.0", "0000:d8:00.0", id="P1-sysfs-in-upper-case"),
        pytest.param("d8:00.0", "0000:d8:00.0", id="P1-lspci"),
        pytest.param("D8:00.0", "0000:d8:00.0", id="P1-lspci-in-upper-case"),
        pytest.param("10000:16:00.0", "10000:16:00.0", id="P2-vmd-domain"),
        pytest.param("00010000:16:00.0", "10000:16:00.0", id="P2-vmd-domain-of-nvml"),
        pytest.param("0009:01:00.0", "0009:01:00.0", id="P3"),
        pytest.param("b3:1f.7", "0000:b3:1f.7", id="P4"),
        pytest.param("ffffffff:ff:1f.7", "ffffffff:ff:1f.7", id="largest"),
    ],
)
def test_every_form_in_use_has_one_canonical_form(text: str, canonical: str) -> None:
    assert str(Bdf.parse(text)) == canonical
    assert Bdf.parse_or_none(text) == Bdf.parse(canonical)


@pytest.mark.parametrize(
    "text",
    [
        "b3:20.0", "000:BA:80.0", "0000:3b.00.0", "3b:00", "3b:00.8", "",  # P5
        "3b:00.0 ", " 3b:00.0", "3b:00.0\n", "3b:00.00", "3b:0.0", "b:00.0", "3b:00:0", "0x3b:00.0", "3g:00.0",
        ":3b:00.0", "123:3b:00.0", "000000000:3b:00.0", "0000:0000:3b:00.0", "3b:00.-1", "+b:00.0", "\u0663b:00.0",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_and_named(text: str) -> None:
    with pytest.raises(ValueError, match="is not a PCI address") as refusal:
        Bdf.parse(text)
    assert str(refusal.value).startswith(repr(text))
    assert Bdf.parse_or_none(text) is None


def test_the_three_forms_of_one_address_are_equal_and_one_key() -> None:
    assert {Bdf.parse(text) for text in ("0000:19:00.0", "19:00.0", "00000000:19:00.0")} == {Bdf(0, 0x19, 0, 0)}


@pytest.mark.parametrize(
    ("one", "other"), [("10000:19:00.0", "0000:19:00.0"), ("10000:16:00.0", "0000:16:00.0"), ("0009:01:00.0", "0000:01:00.0")]
)
def test_another_domain_is_another_address(one: str, other: str) -> None:
    assert Bdf.parse(one) != Bdf.parse(other)


def test_order_is_by_number_from_domain_to_function() -> None:
    ascending = ["02:00.0", "19:00.0", "19:00.1", "19:01.0", "19:1f.7", "b3:00.0", "0009:01:00.0", "10000:01:00.0"]
    assert sorted(map(Bdf.parse, reversed(ascending))) == list(map(Bdf.parse, ascending))


@given(ADDRESSES)
def test_text_of_an_address_parses_back_to_it(bdf: Bdf) -> None:
    assert Bdf.parse(str(bdf)) == bdf
    assert Bdf.parse(str(bdf).upper()) == bdf


@given(st.text(alphabet="0123456789abcdefABCDEF:.", max_size=18))
def test_a_text_parses_only_to_the_numbers_that_it_spells(text: str) -> None:
    bdf = Bdf.parse_or_none(text)
    if bdf is not None:
        domain, _, rest = text.lower().rpartition(":")[0].rpartition(":")
        assert (domain.rjust(8, "0"), rest) == (f"{bdf.domain:08x}", f"{bdf.bus:02x}")
        assert text.lower().endswith(f"{bdf.device:02x}.{bdf.function}")
