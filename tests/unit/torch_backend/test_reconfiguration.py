"""How the members of a group that changes find each other at a store: places are taken once, lists have to be equal."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - after the check that there is a torch

from quicoll.errors import LocalError, Mismatch, PeerError  # noqa: E402 - likewise
from quicoll.torch_backend.reconfiguration import StorePlace, read_handles  # noqa: E402 - likewise

MEMBERS = ["a", "b", "c"]
HANDLES = [f"quicoll:{number:032x}" for number in (3, 1, 2)]


def never() -> bool:
    return False


def far() -> float:
    return time.monotonic() + 600


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


def test_all_who_have_one_list_find_each_other(store: Any) -> None:
    places = [StorePlace(store, "reconfigure/1", MEMBERS, rank) for rank in range(3)]
    for place in places:
        place.wait(far(), 1.0, never)


def test_a_place_is_taken_once_whoever_comes_and_with_whatever_list(store: Any) -> None:
    StorePlace(store, "reconfigure/1", MEMBERS, 0)
    for members in (MEMBERS, ["x", "y"]):
        with pytest.raises(LocalError, match="reconfigure/1: that was already used") as refused:
            StorePlace(store, "reconfigure/1", members, 0)
        assert refused.value.usable
    StorePlace(store, "reconfigure/2", MEMBERS, 0)


def test_another_list_is_a_mismatch_that_names_the_rank_though_others_are_missing(store: Any) -> None:
    first = StorePlace(store, "reconfigure/1", MEMBERS, 0)
    last = StorePlace(store, "reconfigure/1", ["a", "x", "c"], 2)
    with pytest.raises(Mismatch, match="rank 2 was given other members than rank 0") as found:
        first.wait(far(), 1.0, never)
    assert found.value.rank == 2
    with pytest.raises(Mismatch, match="rank 0 was given other members than rank 2"):
        last.wait(far(), 1.0, never)


def test_who_does_not_come_is_named(store: Any) -> None:
    StorePlace(store, "reconfigure/1", MEMBERS, 2)
    first = StorePlace(store, "reconfigure/1", MEMBERS, 0)
    with pytest.raises(PeerError, match=r"rank 1 \(b\) did not come within 2.5 s") as found:
        first.wait(time.monotonic() - 1, 2.5, never)
    assert found.value.rank == 1


def test_who_comes_at_the_last_moment_has_come(store: Any) -> None:
    first = StorePlace(store, "reconfigure/1", MEMBERS[:2], 0)
    StorePlace(store, "reconfigure/1", MEMBERS[:2], 1)
    first.wait(time.monotonic() - 1, 2.5, never)


def test_who_is_aborted_waits_no_longer(store: Any) -> None:
    first = StorePlace(store, "reconfigure/1", MEMBERS, 0)
    with pytest.raises(LocalError, match="it was aborted"):
        first.wait(far(), 1.0, lambda: True)


def test_a_list_of_handles_gives_the_ranks_and_a_set_is_sorted() -> None:
    assert read_handles(HANDLES) == HANDLES
    assert read_handles(set(HANDLES)) == sorted(HANDLES)


@pytest.mark.parametrize(
    ("handles", "said"),
    [
        ([], "0 handles"),
        ([HANDLES[0], HANDLES[0]], "each of them once"),
        (["gloo:0:-1:0:localhost:1"], "no handle of a group over quicoll"),
        ([HANDLES[0] + "\n"], "no handle"),
        (["quicoll:" + "0" * 33], "no handle"),
        ([7], "no handle"),
    ],
)
def test_handles_that_cannot_be_used_are_refused(handles: list[Any], said: str) -> None:
    with pytest.raises(LocalError, match=said):
        read_handles(handles)
