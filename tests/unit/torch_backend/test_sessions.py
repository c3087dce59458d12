"""What is refused before ranks meet: nothing is sent, no thread is started, nobody waits."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed import FileStore, HashStore, PrefixStore  # noqa: E402 - after the check that there is a torch

from quicoll.errors import LocalError, PeerError  # noqa: E402 - likewise
from quicoll.membership.view import Member, View  # noqa: E402 - likewise
from quicoll.torch_backend.reconfiguration import Reconfigurable  # noqa: E402 - likewise
from quicoll.torch_backend.sessions import JobSession, add_worlds, demand_place, demand_shared  # noqa: E402 - likewise


@pytest.mark.parametrize("prefixes", [0, 1, 3])
def test_ranks_of_several_processes_cannot_meet_in_the_memory_of_one(prefixes: int) -> None:
    store: Any = HashStore()
    for number in range(prefixes):
        store = PrefixStore(f"p{number}", store)
    options = SimpleNamespace(
        store=store, group_rank=0, group_size=2, timeout=None, group_id="0", global_ranks_in_group=[]
    )
    before = threading.active_count()
    with pytest.raises(LocalError, match="a HashStore is in the memory of this process, so 2 ranks cannot meet there"):
        Reconfigurable().begin(options)
    assert threading.active_count() == before


def test_one_rank_can_meet_itself_and_others_at_a_file(tmp_path: Any) -> None:
    demand_shared(PrefixStore("p", HashStore()), 1)
    demand_shared(PrefixStore("p", FileStore(str(tmp_path / "store"), 2)), 2)


def test_a_store_that_nobody_meets_at_may_be_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICOLL_COORDINATOR", "127.0.0.1:4433")
    demand_shared(HashStore(), 2)


@pytest.mark.parametrize("rank", [-1, 2, 5])
def test_a_rank_that_the_world_does_not_have_is_refused(rank: int) -> None:
    before = threading.active_count()
    with pytest.raises(LocalError, match=f"rank {rank} of 2 ranks: they are 0 to 1"):
        JobSession(HashStore(), rank=rank, world_size=2, timeout=60.0)
    assert threading.active_count() == before


@pytest.mark.parametrize(("said", "named"), [("2", "2"), ("3", None), (None, None), ("x" * 50, "an unknown number of")])
def test_who_was_started_for_another_number_of_ranks_is_named_where_ranks_have_not_met(
    said: str | None, named: str | None
) -> None:
    store, error = HashStore(), PeerError("rank 2 did not come", rank=2)
    store.set("quicoll/world/0", "3")
    if said is not None:
        store.set("quicoll/world/1", said)
    add_worlds(error, store, 3)
    added = f"; rank 1 was started as one of {named} ranks, this one as one of 3"
    assert (added in str(error)) == (named is not None)
    assert "rank 2 did not come" in str(error)
    assert error.rank == 2


def job_of(nodes: list[str], own: str) -> Any:
    members = tuple(Member(rank=rank, node=node, incarnation=1) for rank, node in enumerate(nodes))
    view = View(view_id=3, members=members, seed=0, committed_step=0, committed_view=0)
    return SimpleNamespace(view=view, rank=view.rank_of(own), world_size=view.world_size)


def test_the_view_of_all_ranks_is_torchs_world() -> None:
    demand_place(job_of(["worker-0", "worker-1"], "worker-1"), 1, 2, met=True)
    demand_place(job_of(["a", "b"], "a"), 0, 2, met=False)


def test_who_left_before_this_rank_was_in_the_view_is_named() -> None:
    with pytest.raises(PeerError, match="left before rank 2 was in the view of all 4 ranks") as found:
        demand_place(job_of(["worker-1", "worker-2"], "worker-2"), 2, 4, met=True)
    assert (found.value.rank, found.value.node, found.value.lost) == (0, "worker-0", ("worker-0", "worker-3"))


@pytest.mark.parametrize("nodes", [["x", "y"], ["x", "z", "y"]])
def test_a_coordinator_of_the_settings_that_has_other_ranks_is_refused(nodes: list[str]) -> None:
    said = f"rank 0 of 2 is rank {len(nodes) - 1} of {len(nodes)} in the job of the coordinator that the settings name"
    with pytest.raises(LocalError, match=said):
        demand_place(job_of(nodes, "y"), 0, 2, met=False)
