"""A process group whose members change and which stays the same object: over sockets, with real coordinators.

Three groups are in this process, each on a thread, and are used by one test after the other. The last tests are
processes, of which one is killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - after the check that there is a torch
from torch_members import LONG, Members, change, total  # noqa: E402 - likewise
from torch_processes import HELPERS, environment  # noqa: E402 - likewise

import quicoll  # noqa: E402 - likewise
from quicoll.torch_backend.reconfiguration import StorePlace  # noqa: E402 - likewise

pytestmark = pytest.mark.slow
SHORT = timedelta(seconds=1)
native = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"),
    reason="torch before 2.14 has no enable_reconfigure: a new process cannot wait for the list of members",
)


@pytest.fixture(scope="module")
def three() -> Iterator[Members]:
    members = Members(3)
    yield members
    members.close()


@pytest.fixture
def pair(three: Members) -> Members:
    """Groups 0 and 1 are at work together, as ranks 0 and 1."""
    if three.together != (0, 1):
        three.join(0, 1)
    return three


def places(members: Members, *numbers: int) -> list[tuple[int, int]]:
    return [(members.groups[number].rank(), members.groups[number].size()) for number in numbers]


def errors(members: Members, *numbers: int) -> list[str]:
    return [members.groups[number].get_error().name for number in numbers]


def gathered(group: Any, number: int) -> list[int]:
    rows = torch.zeros(group.size(), dtype=torch.int64)
    group.all_gather_single(rows, torch.tensor([number])).wait()
    return list(rows.tolist())


def test_the_members_and_their_order_are_those_of_the_list_and_the_group_stays(three: Members) -> None:
    handles = [group.get_reconfigure_handle() for group in three.groups]
    assert len(set(handles)) == 3
    for refused in three.each(lambda group, number: total(group, number)):
        assert isinstance(refused, quicoll.LocalError)
        assert "it waits for reconfigure" in str(refused)
    assert "it waits for reconfigure" in str(three.each(lambda group, _: group.shrink([1]), [0])[0])
    assert errors(three, 0, 1, 2) == ["COMM_ERROR"] * 3
    three.join(0, 1, 2)
    assert places(three, 0, 1, 2) == [(0, 3), (1, 3), (2, 3)]
    assert three.each(lambda group, number: gathered(group, number)) == [[0, 1, 2]] * 3
    three.join(2, 0)
    assert places(three, 0, 2) == [(1, 2), (0, 2)]
    assert three.each(lambda group, number: gathered(group, number), [0, 2]) == [[2, 0]] * 2
    (left_out,) = three.each(lambda group, number: total(group, number), [1])
    assert isinstance(left_out, quicoll.PeerError)  # its view has lost the others
    assert isinstance(left_out, dist.DistBackendError)
    assert errors(three, 0, 1, 2) == ["SUCCESS", "COMM_ERROR", "SUCCESS"]
    three.join(1, 2, 0)
    assert errors(three, 0, 1, 2) == ["SUCCESS"] * 3
    assert three.each(lambda group, number: gathered(group, number)) == [[1, 2, 0]] * 3
    assert [group.get_reconfigure_handle() for group in three.groups] == handles
    assert all(group.supports_reconfigure for group in three.groups)


def test_what_is_refused_leaves_the_view_as_it_is(pair: Members) -> None:
    groups = pair.groups[:2]
    used = pair.fresh() - 1
    taken = pair.fresh()
    for rank in range(2):
        StorePlace(pair.store, f"reconfigure/{taken}", ["somebody", "else"], rank)
    tries: dict[str, Any] = {
        f"the uuid {used} was already used": lambda group, _: group.reconfigure(change(used, groups)),
        f"reconfigure/{taken}: that was already used": lambda group, _: group.reconfigure(change(taken, groups)),
        "not among those": lambda group, number: group.reconfigure(change(pair.fresh(), [groups[1 - number]])),
        "no handle of a group over quicoll": lambda group, _: group.reconfigure(change(pair.fresh(), ["gloo:0"])),
        "[] are no ranks of a group of 2": lambda group, _: group.shrink([]),
        "[2] are no ranks": lambda group, _: group.shrink([2]),
        "[-1] are no ranks": lambda group, _: group.shrink([-1]),
        "which is left out": lambda group, _: group.shrink([0, 1]),
    }
    for said, call in tries.items():
        for refused in pair.each(call, [0, 1]):
            assert isinstance(refused, quicoll.LocalError)
            assert isinstance(refused, dist.DistBackendError)
            assert said in str(refused)
            assert refused.usable
    assert pair.each(lambda group, number: total(group, number + 1), [0, 1]) == [3, 3]


def test_an_abort_ends_what_is_under_way_everywhere(pair: Members) -> None:
    waiting = pair.groups[0].allreduce([torch.ones(1)])  # the other one never calls it
    receiving = pair.groups[1].recv_anysource([torch.ones(1)], 3)
    pair.groups[0].abort()
    pair.together = ()
    (own,) = pair.each(lambda *_: waiting.wait(), [0])
    (other,) = pair.each(lambda *_: receiving.wait(), [1])
    assert isinstance(own, quicoll.QuicollError)
    assert isinstance(other, quicoll.PeerError)
    assert errors(pair, 0) == ["COMM_ERROR"]


def test_a_change_ends_what_is_under_way_and_keeps_what_has_come(pair: Members) -> None:
    tensors = [torch.tensor([1.0]), torch.tensor([2.0])]
    came = pair.each(lambda group, number: group.broadcast([tensors[number]], 1), [0, 1])
    assert pair.each(lambda group, number: total(group, number), [0, 1]) == [1, 1]  # so the broadcast is over on both
    works = [pair.groups[0].allreduce([torch.ones(1)]), pair.groups[1].recv([torch.ones(1)], 0, 5)]
    pair.join(1, 0)  # who was the root, 1, has the other's number now
    assert pair.each(lambda _, number: came[number].wait(), [0, 1]) == [True, True]
    assert [tensor.item() for tensor in tensors] == [2.0, 2.0]
    for error in pair.each(lambda _, number: works[number].wait(), [0, 1]):
        assert isinstance(error, quicoll.QuicollError)
        assert isinstance(error, dist.DistBackendError)
    assert errors(pair, 0, 1) == ["SUCCESS"] * 2  # what failed was of the former view
    assert pair.each(lambda group, number: total(group, number + 1), [0, 1]) == [3, 3]


def test_who_does_not_come_is_named_and_those_who_came_go_on_with_another_uuid(three: Members) -> None:
    uuid, three.together = three.fresh(), ()
    for error in three.each(lambda group, _: group.reconfigure(change(uuid, three.groups, SHORT)), [0, 2]):
        assert isinstance(error, quicoll.PeerError)
        assert "rank 1 (quicoll:" in str(error)
        assert error.rank == 1
    for refused in three.each(lambda group, number: total(group, number), [0, 2]):
        assert isinstance(refused, quicoll.LocalError)
        assert "the change of its members failed" in str(refused)
    three.join(0, 2)
    assert three.each(lambda group, number: total(group, number), [0, 2]) == [2, 2]


def test_members_that_were_given_different_lists_are_told(three: Members) -> None:
    uuid, three.together = three.fresh(), ()
    lists = {0: three.groups[:2], 1: three.groups}
    found = three.each(lambda group, number: group.reconfigure(change(uuid, lists[number])), [0, 1])
    assert [type(error).__name__ for error in found] == ["Mismatch", "Mismatch"]
    assert [error.rank for error in found] == [1, 0]


def test_ranks_are_left_out_by_agreement_or_not_at_all(three: Members) -> None:
    three.join(0, 1, 2)
    three.together = ()
    assert three.each(lambda group, _: group.shrink([1]) is group, [0, 2]) == [True, True]
    assert places(three, 0, 2) == [(0, 2), (1, 2)]
    assert three.each(lambda group, number: gathered(group, number), [0, 2]) == [[0, 2]] * 2
    (left_out,) = three.each(lambda group, number: total(group, number), [1])
    assert isinstance(left_out, quicoll.PeerError)
    three.join(0, 1, 2)
    three.together = ()
    found = three.each(lambda group, number: group.shrink([2] if number == 0 else [1]), [0, 2])
    assert [type(error).__name__ for error in found] == ["Mismatch", "Mismatch"]
    assert [error.rank for error in found] == [1, 0]
    assert three.each(lambda group, _: group.shrink([1]) is group, [0, 2]) == [True, True]  # they try again, and agree
    assert three.each(lambda group, number: gathered(group, number), [0, 2]) == [[0, 2]] * 2


def test_an_abort_in_another_thread_ends_a_change_that_waits_for_members(three: Members) -> None:
    uuid, three.together = three.fresh(), ()
    changing = three.threads.submit(three.groups[0].reconfigure, change(uuid, three.groups))
    while not three.store.check([f"quicoll/reconfigure/{uuid}/place/0"]):
        time.sleep(0.01)
    (second,) = three.each(lambda group, _: group.reconfigure(change(three.fresh(), three.groups)), [0])
    assert "another thread changes the members" in str(second)
    three.groups[0].abort()
    error = changing.exception(LONG.total_seconds())
    assert isinstance(error, quicoll.LocalError)
    assert "it was aborted" in str(error)


def members_of(directory: Path, *names: str) -> dict[str, Any]:
    """Run processes, each with its name; what each of them leaves."""
    program = str(HELPERS / "torch_replaced.py")
    started = [
        subprocess.Popen(
            [sys.executable, program, str(directory), name, *names], env=environment(), stderr=subprocess.PIPE
        )
        for name in names
    ]
    errors = [each.communicate(timeout=500)[1] for each in started]
    assert [each.returncode for each in started] == [-9 if name == "2" else 0 for name in names], errors
    return {name: json.loads((directory / f"{name}.json").read_text()) for name in names if name != "2"}


@pytest.mark.warm("torch")
def test_those_who_are_left_go_on_without_the_one_that_was_killed(tmp_path: Path) -> None:
    found = members_of(tmp_path, "0", "1", "2")
    for said in found.values():
        assert said["told"] == ["PeerError", "worker-2"]
        assert "part of the default group's job" in said["part"]
        assert said["sum"] == 1 + 2
        assert said["part of those left"] == 1 + 2
    assert [found[name]["place"] for name in ("0", "1")] == [[1, 2], [0, 2]]


@native
@pytest.mark.warm("torch")
def test_a_new_process_takes_the_place_of_the_one_that_was_killed(tmp_path: Path) -> None:
    found = members_of(tmp_path, "0", "1", "2", "3")
    for said in found.values():
        assert said["sum"] == 1 + 2 + 4
    assert [found[name]["told"] for name in ("0", "1")] == [["PeerError", "worker-2"]] * 2
    assert [found[name]["place"] for name in ("0", "1", "3")] == [[1, 3], [2, 3], [0, 3]]
