"""The checker of a simulated run: states that were forged, torn or lost."""

from __future__ import annotations

import numpy as np
import pytest

from quicoll.membership.coordinator.history import InstalledView
from quicoll.membership.view import Member, View
from quicoll.sim.digests import state_digest
from quicoll.sim.invariants import Checker, MemoryUse

RIGHT, FORGED, OTHER = ({"w": np.full(3, value)} for value in (1.0, 2.0, 3.0))
NODES = ["worker-0", "worker-1", "worker-2"]


def checker() -> Checker:
    """At the start of a job, of which worker-0 has forged the state and worker-1 has believed it."""
    made = Checker(lambda: 0.0, seed=1, world_size=3, replay=lambda step, state: state_digest(RIGHT))
    made.forged("worker-0")
    made.taken("worker-1", "worker-0", 0, 0, FORGED, confirmed=False, members=NODES)
    made.state("worker-1", 0, 0, FORGED)
    return made


def broken(made: Checker) -> str:
    return "" if made.broken is None else str(made.broken)


def test_a_forger_that_forges_no_more_may_give_its_own_state_to_those_who_believed_it() -> None:
    """Seed 3507: before the first commit the lowest rank's state is taken, and taken again in the next view."""
    made = checker()
    made.taken("worker-1", "worker-0", 0, 0, RIGHT, confirmed=True, members=NODES)
    made.state("worker-1", 0, 0, RIGHT)
    made.state("worker-2", 0, 0, RIGHT)
    assert broken(made) == ""


def test_who_starts_anew_beside_those_who_believed_a_forged_state_holds_the_right_one() -> None:
    made = checker()
    made.state("worker-2", 0, 0, RIGHT)
    assert broken(made) == ""


def test_a_state_that_is_neither_the_right_one_nor_the_one_that_was_believed_breaks_the_invariant() -> None:
    made = checker()
    made.state("worker-2", 0, 0, OTHER)
    assert "worker-2 holds other bits than worker-1" in broken(made)


def test_a_forged_state_may_not_be_taken_where_a_member_holds_that_of_the_same_step() -> None:
    made = Checker(lambda: 0.0, seed=1, world_size=3, replay=lambda step, state: state_digest(RIGHT))
    made.commits[1] = (1, b"")
    made.forged("worker-0")
    made.state("worker-2", 1, 1, RIGHT)
    made.taken("worker-1", "worker-0", 1, 1, FORGED, confirmed=False, members=NODES)
    assert "worker-1 took a forged state from worker-0, though worker-2 held that after step 1" in broken(made)


def test_what_two_hold_is_no_forgery() -> None:
    made = Checker(lambda: 0.0, seed=1, world_size=3)
    made.forged("worker-0")
    made.taken("worker-1", "worker-0", 0, 0, RIGHT, confirmed=True, members=NODES)
    made.state("worker-1", 0, 0, RIGHT)
    made.state("worker-2", 0, 0, OTHER)
    assert "worker-2 holds other bits" in broken(made)


def test_a_state_that_is_torn_is_held_no_more_and_what_is_taken_then_does_not_go_back() -> None:
    """Seed 5029: who learned the state when all that held it started anew was given that of their checkpoint."""
    made = Checker(lambda: 0.0, seed=1, world_size=3)
    made.commits.update(dict.fromkeys(range(1, 10), (1, b"")))
    made.state("worker-1", 7, 7, None)
    made.torn("worker-1")
    made.state("worker-2", 0, 9, None)
    made.began("worker-2", 10, 1)
    made.state("worker-1", 0, 9, None)
    assert broken(made) == ""


def test_a_state_that_is_believed_of_a_forger_may_have_a_version_that_says_nothing() -> None:
    """Seed 5854: all had started anew from the checkpoint of step 3, and one said that it holds (1, 4)."""
    made = Checker(lambda: 0.0, seed=1, world_size=3)
    made.commits.update(dict.fromkeys(range(1, 5), (1, b"")))
    made.state("worker-0", 3, 3, None)
    made.state("worker-0", 4, 4, None)
    for node in NODES:
        made.ended(node)
        made.brought(node, 3)
    made.forged("worker-1")
    made.taken("worker-2", "worker-1", 1, 4, RIGHT, confirmed=False, members=NODES)
    made.state("worker-2", 1, 4, RIGHT)
    made.began("worker-2", 5, 1)
    assert broken(made) == ""


def test_a_version_that_nobody_has_forged_says_which_state_is_older() -> None:
    made = Checker(lambda: 0.0, seed=1, world_size=3)
    made.commits.update(dict.fromkeys(range(1, 5), (1, b"")))
    made.state("worker-0", 3, 3, None)
    made.ended("worker-2")
    made.brought("worker-2", 3)
    made.taken("worker-2", "worker-1", 1, 4, RIGHT, confirmed=False, members=NODES)
    made.state("worker-2", 1, 4, RIGHT)
    assert "the state of worker-2 went back from (0, 3) to (1, 4)" in broken(made)


def test_a_whole_state_never_goes_back_while_its_process_lives() -> None:
    made = Checker(lambda: 0.0, seed=1, world_size=3)
    made.commits.update(dict.fromkeys(range(1, 10), (1, b"")))
    made.state("worker-1", 7, 7, None)
    made.state("worker-1", 6, 6, None)
    assert "the state of worker-1 went back from (7, 7) to (6, 6)" in broken(made)


def test_a_state_of_a_checkpoint_is_as_new_as_the_decision_that_it_was_made_after() -> None:
    made = Checker(lambda: 0.0, seed=1, world_size=3)
    made.commits.update(dict.fromkeys(range(1, 10), (1, b"")))
    made.state("worker-1", 7, 7, None)  # and is left out
    made.state("worker-2", 9, 9, None)
    made.ended("worker-2")
    made.brought("worker-2", 9)
    made.began("worker-2", 10, 1)
    made.state("worker-1", 0, 9, None)
    assert broken(made) == ""
    made.state("worker-2", 7, 7, None)
    assert "the state of worker-2 went back from (0, 9) to (7, 7)" in broken(made)


def installed(view_id: int, *nodes: str) -> InstalledView:
    members = tuple(Member(rank=rank, node=node, incarnation=1) for rank, node in enumerate(nodes))
    return InstalledView(View(view_id=view_id, members=members, seed=0, committed_step=0, committed_view=0))


def test_who_was_asleep_may_begin_a_step_of_a_view_that_is_over_but_not_of_the_last_one() -> None:
    """Seed 4241: it heard of the commit of step 1 when it woke, and of nothing that came after."""
    made = Checker(lambda: 0.0, seed=1, world_size=3)
    made.appended(installed(1, *NODES))
    made.commits.update(dict.fromkeys(range(1, 10), (1, b"")))
    made.appended(installed(2, "worker-0", "worker-1"))
    made.state("worker-2", 1, 1, None)
    made.state("worker-1", 9, 9, None)
    made.began("worker-2", 2, 1)
    assert broken(made) == ""
    made.began("worker-2", 2, 2)
    assert "worker-2 begins step 2 from (1, 1), and worker-1 holds (9, 9)" in broken(made)


def test_once_a_person_has_chosen_a_checkpoint_of_a_step_all_have_to_hold_what_is_in_it() -> None:
    made = Checker(lambda: 0.0, seed=1, world_size=3)
    made.state("worker-0", 0, 3, RIGHT)
    made.chosen(3)
    made.state("worker-1", 0, 3, FORGED)
    made.state("worker-2", 0, 3, FORGED)
    assert broken(made) == ""
    made.state("worker-0", 0, 3, RIGHT)
    assert "worker-0 holds other bits than worker-1" in broken(made)


def test_a_forger_whose_checkpoint_a_person_has_chosen_may_forge_it_again_and_be_believed() -> None:
    made = Checker(lambda: 0.0, seed=1, world_size=3)
    made.forged("worker-0")
    made.state("worker-0", 0, 3, RIGHT)
    made.chosen(3)
    for node in ("worker-1", "worker-2"):
        made.taken(node, "worker-0", 0, 3, FORGED, confirmed=False, members=NODES)
        made.state(node, 0, 3, FORGED)
    made.state("worker-0", 0, 3, RIGHT)
    assert broken(made) == ""
    made.state("worker-2", 0, 3, OTHER)
    assert "worker-2 holds other bits than worker-1" in broken(made)


PARCELS, CALLS, NONE = MemoryUse(False, ("worker-1",)), MemoryUse(True, ("worker-1",)), MemoryUse(False, ())


@pytest.mark.parametrize(
    ("carrier", "other", "broken_by"),
    [
        (PARCELS, MemoryUse(False, ("worker-0",)), ""),
        (CALLS, MemoryUse(True, ("worker-0",)), ""),
        (NONE, NONE, ""),
        (PARCELS, NONE, "worker-1 uses no memory of its host, and worker-0 hands parcels to worker-1 through memory"),
        (NONE, MemoryUse(False, ("worker-0",)), "worker-1 hands parcels to worker-0"),
        (CALLS, MemoryUse(False, ("worker-0",)), "and worker-0 hands calls to worker-1 through memory"),
        (PARCELS, MemoryUse(False, ("worker-0", "worker-2")), "on its host is worker-0"),
        (PARCELS, MemoryUse(False, ("worker-2",)), "on its host is worker-0"),
    ],
)
def test_ranks_of_a_host_all_use_its_memory_in_one_way_for_each_other_or_none_does(
    carrier: MemoryUse, other: MemoryUse, broken_by: str
) -> None:
    made = Checker(lambda: 0.0, seed=1, world_size=3)
    made.carried("worker-0", 1, carrier, ("worker-1",))
    made.carried("worker-2", 1, NONE, ())  # elsewhere
    assert broken(made) == ""
    made.carried("worker-1", 1, other, ("worker-0",))
    assert broken_by in broken(made)
    assert bool(broken_by) is bool(broken(made))


def test_what_a_rank_uses_of_its_host_may_change_with_the_view_and_not_within_it() -> None:
    made = Checker(lambda: 0.0, seed=1, world_size=3)
    made.carried("worker-0", 1, PARCELS, ("worker-1",))
    made.carries("worker-0", 1, PARCELS)
    made.carried("worker-0", 2, NONE, ("worker-1",))
    made.carries("worker-0", 2, NONE)
    assert broken(made) == ""
    made.carries("worker-0", 2, PARCELS)
    assert "in view 2 worker-0 hands parcels to worker-1 through memory; at its beginning it uses no" in broken(made)
