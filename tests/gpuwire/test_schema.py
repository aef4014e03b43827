"""Lockstep: the contract's table, row by row and policy by policy."""

from __future__ import annotations

import pytest

from gpuwire.schema import CURRENT, Policy, Schema, Unversioned, judge, parse_schema

OURS = Schema(5, "0123456789abcdef")
SAME = "5;0123456789abcdef"
DRIFT = "5;ffffffffffffffff"
NEWER = "6;0123456789abcdef"
OLDER = "4;0123456789abcdef"
ZERO = "0;0123456789abcdef"

MALFORMED = [
    "", ";", "5", "5;", ";0123456789abcdef", "0123456789abcdef", "5:0123456789abcdef", "5,0123456789abcdef",
    "5;0123456789ABCDEF", "5;0123456789abcde", "5;0123456789abcdef0", "5;0123456789abcdeg", "5; 0123456789abcdef",
    "5 ;0123456789abcdef", " 5;0123456789abcdef", "5;0123456789abcdef ", "5;0123456789abcdef\n", "-5;0123456789abcdef",
    "+5;0123456789abcdef", "5.0;0123456789abcdef", "0x5;0123456789abcdef", "v5;0123456789abcdef", "\u0665;0123456789abcdef",
    "5;0123456789abcdef;", "5;0123456789abcdef, 5;0123456789abcdef", "9" * 5000 + ";0123456789abcdef", "x" * 10_000,
]  # fmt: skip


@pytest.mark.parametrize(
    ("header", "status", "passes"),
    [
        pytest.param(SAME, "match", {"lockstep", "forward"}, id="same"),
        pytest.param(DRIFT, "drift", set(), id="same-version-other-content"),
        pytest.param(NEWER, "newer", {"forward"}, id="higher"),
        pytest.param(OLDER, "older", {"forward"}, id="lower"),
        pytest.param(ZERO, "older", {"forward"}, id="version-0"),
        pytest.param("6;ffffffffffffffff", "newer", {"forward"}, id="higher-with-other-content"),
        *(pytest.param(text, "drift", set(), id=f"malformed-{text[:24]!r}") for text in MALFORMED),
    ],
)
@pytest.mark.parametrize("unversioned", list(Unversioned))
def test_a_guest_that_names_a_schema_is_judged_by_the_policy(
    header: str, status: str, passes: set[str], unversioned: Unversioned
) -> None:
    for policy in (Policy.LOCKSTEP, Policy.FORWARD):
        verdict = judge(header, policy, unversioned, ours=OURS)
        assert verdict.status == status
        assert (verdict.refusal == "") == (policy.value in passes)


@pytest.mark.parametrize("policy", [Policy.LOCKSTEP, Policy.FORWARD])
def test_a_guest_that_names_none_is_judged_by_the_unversioned_setting(policy: Policy) -> None:
    allowed = judge(None, policy, Unversioned.ALLOW, ours=OURS)
    denied = judge(None, policy, Unversioned.DENY, ours=OURS)
    assert (allowed.status, allowed.refusal) == ("unversioned", "")
    assert denied.status == "unversioned"
    assert "names no schema" in denied.refusal
    assert f"the host has {OURS}" in denied.refusal
    assert "--unversioned allow" in denied.refusal


@pytest.mark.parametrize("unversioned", list(Unversioned))
@pytest.mark.parametrize("header", [None, SAME, DRIFT, NEWER, OLDER, ZERO, *MALFORMED])
def test_with_the_policy_off_everything_passes_unchecked(header: str | None, unversioned: Unversioned) -> None:
    verdict = judge(header, Policy.OFF, unversioned, ours=OURS)
    assert (verdict.status, verdict.refusal) == ("unchecked", "")


@pytest.mark.parametrize(
    ("policy", "header", "way_out"),
    [
        (Policy.LOCKSTEP, NEWER, "--schema-policy forward"),
        (Policy.LOCKSTEP, OLDER, "--schema-policy forward"),
        (Policy.LOCKSTEP, ZERO, "--schema-policy forward"),
        (Policy.LOCKSTEP, DRIFT, "--schema-policy off"),
        (Policy.FORWARD, DRIFT, "--schema-policy off"),
        (Policy.LOCKSTEP, "nonsense", "--schema-policy off"),
        (Policy.FORWARD, "nonsense", "--schema-policy off"),
    ],
)
def test_a_refusal_names_both_schemas_and_the_flag_that_lets_it_pass(policy: Policy, header: str, way_out: str) -> None:
    refusal = judge(header, policy, Unversioned.DENY, ours=OURS, host="aggregator").refusal
    assert header in refusal
    assert f"the aggregator has {OURS}" in refusal
    assert way_out in refusal
    assert "\n" not in refusal


def test_a_refusal_is_short_however_long_the_header() -> None:
    assert len(judge("x" * 10_000, Policy.LOCKSTEP, Unversioned.DENY).refusal) < 400


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_header_is_no_schema(text: str) -> None:
    assert parse_schema(text) is None


@pytest.mark.parametrize("schema", [OURS, CURRENT, Schema(0, "0" * 16), Schema(9_999_999_999, "f" * 16)])
def test_a_schema_reads_as_it_is_written(schema: Schema) -> None:
    assert parse_schema(str(schema)) == schema


def test_our_own_schema_matches_itself() -> None:
    assert judge(str(CURRENT), Policy.LOCKSTEP, Unversioned.DENY).status == "match"
