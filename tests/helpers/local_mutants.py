"""Mutants of the carrier in shared memory, and scenarios of ranks on one host that find them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash

import quicoll.local.large
import quicoll.local.small
from quicoll.engine.neighbours import Neighbours
from quicoll.errors import Mismatch, QuicollError
from quicoll.sim import Settings, Simulation

if TYPE_CHECKING:
    from quicoll.engine.neighbourhood import Neighbourhood
    from quicoll.job import Job
    from quicoll.sim.outcome import Outcome

__all__ = ["LOCAL_MUTANTS"]

Patch = pytest.MonkeyPatch

SETTINGS = Settings(
    ranks=3, hosts=("one", "one", "one"), lost_after=0.5, restart_after=0.1, recovery=10.0, limit=60.0, timeout=5.0
)


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

    def forgetful(self: Neighbours, view_id: int) -> Neighbourhood | None:
        near = take(self, view_id)
        if near is None or self._node != "worker-1":
            return near
        near.end()
        return None

    patch.setattr(Neighbours, "take", forgetful)


LOCAL_MUTANTS: tuple[tuple[Callable[[Patch], None], Callable[[], Outcome], str], ...] = (
    (one_rank_loses_what_was_settled, ranks_that_call_the_same, "one-carrier"),
    (digests_are_not_compared, ranks_that_call_different_things, "worker"),
    (checksums_of_small_payloads_are_not_compared, a_small_payload_with_another_bit, "worker"),
    (checksums_of_large_payloads_are_not_compared, a_large_payload_with_another_bit, "worker"),
)
