"""Nodes that stand by: who is shown to the others, when, and what that changes for them."""

from __future__ import annotations

import pytest
from coordinator_bench import SECOND, Bench

from quicoll.errors import LocalError
from quicoll.membership import messages as m
from quicoll.membership.coordinator.config import CoordinatorConfig
from quicoll.membership.view import Member, View
from quicoll.state.warm_blocks import next_places


def with_spares(*spares: str, warm: int = 1) -> Bench:
    bench = Bench(2, max_world_size=2, warm_spares=warm)
    bench.installed("a", "b")
    bench.join(*spares)
    bench.inbox.clear()
    return bench


def shown(bench: Bench) -> list[str]:
    """The spares of the view that is proposed or installed last."""
    return [member.node for member in bench.proposed().members if member.spare]


def warm(bench: Bench, *spares: str) -> None:
    """Commit a step, and let these be shown and step out, one after the other."""
    bench.commit("a", "b")
    for spare in spares:
        assert shown(bench) == [spare]
        bench.confirm()
        bench.say(spare, m.Learn(view_id=bench.view_id))
    bench.confirm()


def test_a_spare_is_shown_at_the_first_boundary_after_a_commit_and_never_before() -> None:
    bench = with_spares("c")
    bench.advance(SECOND)
    assert bench.proposed().nodes == ("a", "b")
    bench.commit("a", "b")
    assert bench.proposed().nodes == ("a", "b", "c")
    assert shown(bench) == ["c"]


def test_a_warm_spare_is_out_of_views_until_a_place_is_free_and_has_it_then() -> None:
    bench = with_spares("c")
    warm(bench, "c")
    assert bench.proposed().nodes == ("a", "b")
    bench.commit("a", "b")
    assert bench.proposed().nodes == ("a", "b")
    bench.say("b", m.Leave(reason="terminated", committed_step=2))
    assert bench.confirm().nodes == ("a", "c")
    assert shown(bench) == []


def test_the_spare_has_the_last_rank_whatever_its_name() -> None:
    bench = Bench(2, max_world_size=2, warm_spares=1)
    bench.installed("b", "c")
    bench.join("a")
    bench.commit("b", "c")
    assert bench.proposed().nodes == ("b", "c", "a")
    assert shown(bench) == ["a"]


@pytest.mark.parametrize("lost", "abcd")
@pytest.mark.parametrize(
    ("hints", "place"),
    [
        ({}, 2),  # by name
        ({"a": 3, "b": 2, "c": 0, "d": 1}, 4),  # one without a hint comes last
        ({"a": 3, "b": 2, "c": 5, "d": 1, "bb": 4}, 3),  # 4 is more than two of the hints, and three of the names
        ({"a": 8, "b": 9, "c": 6, "d": 7, "bb": 3}, 0),  # what it would have guessed from four ranks: 3
        ({"a": 1, "b": 1, "c": 1, "d": 1, "bb": 1}, 2),
        ({"a": 1, "c": 0, "bb": 7}, 2),
    ],
)
def test_the_place_that_a_spare_is_told_is_the_one_that_it_gets_whoever_is_lost(
    hints: dict[str, int], place: int, lost: str
) -> None:
    bench = Bench(4, max_world_size=4, warm_spares=1)
    for node in "abcd":
        bench.join(node, rank_hint=hints.get(node))
    bench.confirm()
    bench.join("bb", rank_hint=hints.get("bb"))
    bench.commit(*"abcd")
    view = bench.proposed()
    assert [(member.node, member.place) for member in view.members if member.spare] == [("bb", place)]
    before = [node for node in view.nodes[:4] if node != lost]
    bench.confirm()
    bench.say("bb", m.Learn(view_id=bench.view_id))
    bench.confirm()
    bench.lose(lost)
    bench.advance(SECOND)
    after = bench.confirm()
    assert [node for node in after.nodes if node != "bb"] == before
    got = after.rank_of("bb")
    assert got == (place if place <= view.nodes.index(lost) else place - 1)
    assert got in next_places(view, "bb")


def test_a_spare_does_not_count_for_the_quorum() -> None:
    bench = Bench(1, max_world_size=1, warm_spares=1)
    bench.installed("a")
    bench.join("c")
    bench.commit("a")
    assert bench.confirm().nodes == ("a", "c")
    assert bench.core.history.base == ("a",)
    bench.lose("c")
    assert bench.confirm().nodes == ("a",)
    bench.commit("a")


def test_so_many_are_shown_as_are_to_be_warm_one_at_a_time() -> None:
    bench = with_spares("c", "d", "e", warm=2)
    warm(bench, "c", "d")
    bench.commit("a", "b")
    assert bench.proposed().nodes == ("a", "b")


def test_a_warm_spare_goes_before_a_cold_one() -> None:
    bench = with_spares("d")
    warm(bench, "d")
    bench.join("c")
    bench.say("b", m.Leave(reason="terminated", committed_step=1))
    assert bench.confirm().nodes == ("a", "d", "c")
    assert shown(bench) == ["c"]


def test_a_spare_that_learns_no_more_is_shown_again_after_a_pause_that_doubles() -> None:
    bench = with_spares("c")
    warm(bench, "c")
    for pause in (2, 4, 8):
        bench.say("c", m.Learned())
        bench.commit("a", "b")
        bench.advance((pause - 1) * SECOND)
        bench.commit("a", "b")
        assert bench.proposed().nodes == ("a", "b")
        bench.advance(2 * SECOND)
        warm(bench, "c")


@pytest.mark.parametrize("warm_spares", [-1, 5000])
def test_a_number_of_warm_spares_that_cannot_be_is_refused(warm_spares: int) -> None:
    with pytest.raises(LocalError, match="warm_spares is 0 to"):
        CoordinatorConfig(world_size=1, warm_spares=warm_spares)


def test_a_view_has_its_spares_last_and_at_least_one_rank_that_is_none() -> None:
    def view(*places: int | None) -> View:
        members = tuple(
            Member(rank=rank, node=f"n{rank}", incarnation=1, spare=at is not None, place=at or 0)
            for rank, at in enumerate(places)
        )
        return View(view_id=1, members=members, seed=0, committed_step=0, committed_view=0)

    assert view(None, None, 2).workers == 2
    for wrong in ((0, None), (0,)):
        with pytest.raises(ValueError, match="spares have the last ranks"):
            view(*wrong)
    with pytest.raises(ValueError, match="a spare comes after more ranks than there are"):
        view(None, None, 3)
