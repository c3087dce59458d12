"""Process groups that torch knows nothing of, beside its own: over sockets, each rank a thread of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - after the check that there is a torch

import quicoll  # noqa: E402 - likewise
from quicoll.torch_backend import group_at  # noqa: E402 - likewise

pytestmark = [pytest.mark.loopback, pytest.mark.slow]
LONG = timedelta(seconds=200)  # nothing of what is shown takes as long


@pytest.fixture
def default_group() -> Iterator[Any]:
    """A default group over quicoll, of this process alone."""
    dist.init_process_group("quicoll", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def each(ranks: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(work, range(ranks)))


def made(ranks: int) -> list[Any]:
    store = dist.HashStore()
    return each(ranks, lambda rank: group_at(store, rank, ranks, timeout=LONG))


def total(group: Any, number: float) -> float:
    x = torch.tensor([number])
    group.allreduce([x]).wait()
    return float(x)


def test_groups_have_jobs_of_their_own_beside_the_default_group(default_group: Any) -> None:
    pairs = [made(2), made(2)]
    for pair in pairs:
        assert [(group.rank(), group.size()) for group in pair] == [(0, 2), (1, 2)]
    assert total(default_group, 7) == 7
    pairs[0][0].abort()
    with pytest.raises(quicoll.PeerError):
        total(pairs[0][1], 1)
    assert each(2, lambda rank: total(pairs[1][rank], rank + 1)) == [3, 3]
    assert total(default_group, 8) == 8
    dist.new_group([0], backend="quicoll")  # a part of the default group, not of the one that was made last
    each(2, lambda rank: pairs[1][rank].shutdown())
    pairs[0][1].shutdown()


def test_who_has_left_is_named_in_words_that_torchs_programs_look_for() -> None:
    groups = made(3)
    assert each(3, lambda rank: total(groups[rank], 1)) == [3, 3, 3]
    groups[2].shutdown()
    for group in groups[:2]:
        with pytest.raises(dist.DistBackendError, match="Connection closed by peer") as raised:
            total(group, 1)
        assert isinstance(raised.value, quicoll.PeerError)
        assert raised.value.lost == ("worker-2",)
        assert raised.value.rank == 2
        group.abort()


def test_a_rank_that_does_not_come_is_named_in_words_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quicoll.torch_backend.sessions._MEET_S", 0.3)
    with pytest.raises(dist.DistBackendError, match=r"Socket Timeout: wait timeout after 300ms") as raised:
        group_at(dist.HashStore(), 0, 2, timeout=timedelta(milliseconds=10))
    assert isinstance(raised.value, quicoll.PeerError)
    assert raised.value.rank == 1


def test_torch_compile_reads_no_method_of_a_group() -> None:
    from torch._dynamo.testing import CompileCounter

    (group,) = made(1)
    counter = CompileCounter()
    work = torch.compile(group.allreduce, backend=counter)([torch.ones(2)])
    torch.compile(work.wait, backend=counter)()
    assert counter.frame_count == 0
    group.shutdown()
