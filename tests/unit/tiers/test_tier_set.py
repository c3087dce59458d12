"""Sets of tiers: what can be one, that equal ones have one encoding, and who holds a tier in a view."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quicoll.errors import LocalError
from quicoll.membership.view import Member, View
from quicoll.tiers.tier_set import MAX_TIER_SET, MAX_TIERS, TierSet

NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


@st.composite
def tier_sets(draw: st.DrawFn) -> TierSet:
    placement = draw(st.dictionaries(NAMES, st.lists(NAMES, max_size=3, unique=True), max_size=5))
    active = draw(st.lists(NAMES, max_size=3, unique=True))
    return TierSet(active, placement, version=draw(st.integers(0, 2**63 - 1)))


def view_of(*nodes: str) -> View:
    members = tuple(Member(rank=rank, node=node, incarnation=1) for rank, node in enumerate(nodes))
    return View(view_id=3, members=members, seed=1, committed_step=0, committed_view=0)


@given(tier_sets())
def test_a_set_comes_back_from_its_encoding(tier_set: TierSet) -> None:
    again = TierSet.decode(tier_set.encoded)
    assert again == tier_set
    assert (again.version, again.active, dict(again.placement)) == (
        tier_set.version,
        tier_set.active,
        dict(tier_set.placement),
    )
    assert again.digest == tier_set.digest
    assert hash(again) == hash(tier_set)


def test_the_order_in_which_tiers_are_placed_does_not_count_and_that_of_active_ones_does() -> None:
    one = TierSet(["a", "b"], {"a": ["x"], "c": ["y", "x"]})
    assert one == TierSet(["a", "b"], {"c": ["y", "x"], "a": ["x"]})
    assert one != TierSet(["b", "a"], {"a": ["x"], "c": ["y", "x"]})
    assert one.cold == ("c",)
    assert dict(one.placement) == {"a": ("x",), "b": (), "c": ("y", "x")}


@pytest.mark.parametrize(
    ("active", "placement", "version", "said"),
    [
        (["a", "a"], {}, 0, "twice"),
        (["a"], {"a": ["x", "x"]}, 0, "twice"),
        ([""], {}, 0, "length"),
        ("ab", {}, 0, "a sequence of names"),
        (["a"], {"a": "x"}, 0, "a sequence of names"),
        (["a" * 129], {}, 0, "length"),
        ([f"tier {number}" for number in range(MAX_TIERS + 1)], {}, 0, "length"),
        (["a"], {}, -1, ">= 0"),
        (["a"], {}, 2**63, "<="),
        ([3], {}, 0, "str"),
        (["\ud800"], {}, 0, "no set of tiers"),
        ([], {f"tier {number}": [f"{node:0128}" for node in range(1024)] for number in range(16)}, 0, "at most"),
    ],
)
def test_what_can_be_no_set_is_refused(active: Any, placement: Any, version: int, said: str) -> None:
    with pytest.raises(LocalError, match=said):
        TierSet(active, placement, version=version)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode((1, ("a",), ())),  # an active tier without a placement
        msgspec.msgpack.encode((1, (), (("b", ()), ("a", ())))),  # not in order
        msgspec.msgpack.encode((1, (), (("a", ()), ("a", ())))),
        msgspec.msgpack.encode((1, (), (), 7)),
        TierSet(["a"]).encoded + b"\0",
        b"\0" * (MAX_TIER_SET + 1),
    ],
)
def test_bytes_that_no_set_is_encoded_as_are_refused(data: bytes) -> None:
    with pytest.raises(LocalError):
        TierSet.decode(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_set_or_refused(data: bytes) -> None:
    try:
        assert TierSet.decode(data).encoded == data
    except LocalError:
        pass


def test_the_set_that_follows_keeps_what_is_not_changed() -> None:
    first = TierSet(["a"], {"b": ["x"]}, version=4)
    second = first.changed(active=["b"])
    assert (second.version, second.active, dict(second.placement)) == (5, ("b",), {"a": (), "b": ("x",)})
    third = second.changed(placement={"b": ["y"]})
    assert (third.version, third.active, third.placement["b"]) == (6, ("b",), ("y",))
    with pytest.raises(AttributeError, match="does not change"):
        third.version = 7
    placement: Any = third.placement
    with pytest.raises(TypeError):
        placement["b"] = ()


def test_a_tier_is_on_the_ranks_of_its_nodes_in_each_view() -> None:
    tier_set = TierSet(["hot"], {"cold": ["n2", "n9", "n0"]})
    assert tier_set.ranks("hot", view_of("n0", "n1", "n2")) == (0, 1, 2)
    assert tier_set.ranks("cold", view_of("n0", "n1", "n2")) == (2, 0)
    assert tier_set.ranks("cold", view_of("n1", "n2")) == (1,)
    assert tier_set.absent(view_of("n1", "n2")) == ("n0", "n9")
    with pytest.raises(LocalError, match="no tier 'warm'"):
        tier_set.ranks("warm", view_of("n0"))


@pytest.mark.parametrize("given", [{"active": [["a"]]}, {"placement": [1]}, {"placement": {("a",): [["x"]]}}], ids=str)
def test_what_cannot_be_named_is_refused_by_an_error_of_ours(given: Any) -> None:
    with pytest.raises(LocalError, match="no set of tiers"):
        TierSet(**given)
