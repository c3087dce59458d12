"""Mutants of the carrier in shared memory, and scenarios of ranks on one host that find them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash

import quicoll.local.large
import quicoll.local.parcels
import quicoll.local.small
from quicoll.engine.communicator import Communicator
from quicoll.engine.host_ways import HostWays
from quicoll.engine.neighbours import Neighbours
from quicoll.errors import Mismatch, QuicollError
from quicoll.sim import Settings, Simulation

if TYPE_CHECKING:
    from quicoll.engine.executor import Way
    from quicoll.engine.neighbours import Sharing
    from quicoll.job import Job
    from quicoll.sim.outcome import Outcome
    from quicoll_transport.endpoint import Link

__all__ = ["LOCAL_MUTANTS"]

Patch = pytest.MonkeyPatch

SETTINGS = Settings(
    ranks=3, hosts=("one", "one", "one"), lost_after=0.5, restart_after=0.1, recovery=10.0, limit=60.0, timeout=5.0
)

TWO_HOSTS = replace(SETTINGS, ranks=4, hosts=("one", "one", "two", "two"))


def ranks_that_call_different_things() -> Outcome:
    """Rank 1 asks for another operation, outside of any step, whose votes would find it too."""

    async def worker(job: Job) -> None:
        with pytest.raises(Mismatch):
            await job.group.all_reduce(np.full(4, job.rank + 1.0), op="max" if job.rank == 1 else "sum")

    return Simulation(worker, settings=SETTINGS).run()


def ranks_that_call_the_same() -> Outcome:
    async def worker(job: Job) -> None:
        assert (await job.group.all_reduce(np.full(4, job.rank + 1.0)) == 6).all()

    return Simulation(worker, settings=SETTINGS).run()


def ranks_of_two_hosts() -> Outcome:
    """What they say is too short for parcels, so that no result, and no call, tells how it goes."""

    async def worker(job: Job) -> None:
        async with job.step():
            assert (await job.group.all_reduce(np.full(4, job.rank + 1.0)) == 10).all()

    return Simulation(worker, settings=TWO_HOSTS).run()


def a_parcel_with_another_bit() -> Outcome:
    """Rank 3 reads other bits than were written, outside of any step; results are right, or there is none."""

    async def worker(job: Job) -> None:
        try:
            found: Any = await job.group.all_reduce(np.full(20_000, job.rank + 1.0))
        except QuicollError:
            return
        assert (found == 10).all()

    sim = Simulation(worker, settings=TWO_HOSTS)
    sim.at(0.0).memory(3, "spoil")
    return sim.run()


def _with_other_bits(count: int) -> Outcome:
    """Rank 1 reads another bit than was written, outside of any step; results are right, or there is none."""

    async def worker(job: Job) -> None:
        for turn in range(12):
            try:
                found: Any = await job.group.all_reduce(np.full(count, job.rank + turn))
            except QuicollError:
                return
            assert (found == 3 + 3 * turn).all()

    sim = Simulation(worker, settings=SETTINGS)
    sim.at(0.0).memory(1, "spoil", after=9)
    return sim.run()


def a_small_payload_with_another_bit() -> Outcome:
    return _with_other_bits(5)


def a_large_payload_with_another_bit() -> Outcome:
    return _with_other_bits(20_000)


def digests_are_not_compared(patch: Patch) -> None:
    kept = SimpleNamespace(xxh3_128_digest=lambda text: bytes(16), xxh3_64_intdigest=xxhash.xxh3_64_intdigest)
    patch.setattr(quicoll.local.small, "xxhash", kept)


def checksums_of_small_payloads_are_not_compared(patch: Patch) -> None:
    kept = SimpleNamespace(xxh3_128_digest=xxhash.xxh3_128_digest, xxh3_64_intdigest=lambda data: 0)
    patch.setattr(quicoll.local.small, "xxhash", kept)


def checksums_of_large_payloads_are_not_compared(patch: Patch) -> None:
    patch.setattr(quicoll.local.large, "_sum", lambda data: bytes(8))


def one_rank_loses_what_was_settled(patch: Patch) -> None:
    take = Neighbours.take

    def forgetful(self: Neighbours, view_id: int) -> Sharing | None:
        near = take(self, view_id)
        if near is None or self._node != "worker-1":
            return near
        near.end()
        return None

    patch.setattr(Neighbours, "take", forgetful)


def one_rank_hands_its_neighbour_everything_over_the_network(patch: Patch) -> None:
    """It has the memory, and uses it for nothing that it says."""
    to = HostWays.to

    def fewer(self: HostWays, links: Mapping[int, Link]) -> dict[int, Way]:
        mine = next(number for number, rank in enumerate(self.ranks) if rank not in links)
        return {} if self.ranks[mine] == 1 else to(self, links)

    patch.setattr(HostWays, "to", fewer)


def a_way_is_given_up_for_the_network_when_it_was_used(patch: Patch) -> None:
    """As where a rank leaves memory in the midst of a view, and none of the others knows of it."""
    start = Communicator.start

    def leaving(self: Communicator, *args: Any, **settings: Any) -> Any:
        found = start(self, *args, **settings)
        self._ways.update(self._links)
        return found

    patch.setattr(Communicator, "start", leaving)


def checksums_of_parcels_are_not_compared(patch: Patch) -> None:
    kept = SimpleNamespace(xxh3_64_intdigest=lambda data: 0)
    patch.setattr(quicoll.local.parcels, "xxhash", kept)


LOCAL_MUTANTS: tuple[tuple[Callable[[Patch], None], Callable[[], Outcome], str], ...] = (
    (one_rank_loses_what_was_settled, ranks_that_call_the_same, "one-carrier"),
    (one_rank_loses_what_was_settled, ranks_of_two_hosts, "one-carrier"),
    (one_rank_hands_its_neighbour_everything_over_the_network, ranks_of_two_hosts, "one-carrier"),
    (a_way_is_given_up_for_the_network_when_it_was_used, ranks_of_two_hosts, "one-carrier"),
    (checksums_of_parcels_are_not_compared, a_parcel_with_another_bit, "worker"),
    (digests_are_not_compared, ranks_that_call_different_things, "worker"),
    (checksums_of_small_payloads_are_not_compared, a_small_payload_with_another_bit, "worker"),
    (checksums_of_large_payloads_are_not_compared, a_large_payload_with_another_bit, "worker"),
)
