"""Mutants of the carrier in shared memory: each is found by a scenario of ranks on one host, or by a named test."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash
from named_tests import Below, run_named

import quicoll.local.large
import quicoll.local.small
from quicoll.errors import Mismatch, QuicollError
from quicoll.local.layout import PUBLISHED
from quicoll.sim import Settings, Simulation

if TYPE_CHECKING:
    from quicoll.job import Job
    from quicoll.sim.outcome import Outcome

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


def a_call_is_counted_before_it_is_written(patch: Patch) -> None:
    """As where stores are seen in another order than they were made."""
    publish = quicoll.local.small.SmallCalls._publish

    def hasty(self: Any) -> None:
        memory = self._memory
        if self._waiting and self._has_room(self._published):
            memory.store(PUBLISHED, self._published + 1)
        publish(self)

    patch.setattr(quicoll.local.small.SmallCalls, "_publish", hasty)


MUTANTS: tuple[tuple[Callable[[Patch], None], Callable[[], Outcome], str], ...] = (
    (digests_are_not_compared, ranks_that_call_different_things, "worker"),
    (checksums_of_small_payloads_are_not_compared, a_small_payload_with_another_bit, "worker"),
    (checksums_of_large_payloads_are_not_compared, a_large_payload_with_another_bit, "worker"),
)

BELOW = (
    Below(
        a_call_is_counted_before_it_is_written,
        "unit/local/test_small.py",
        "test_every_rank_gets_what_all_gave_in_whatever_order_the_stores_are_seen",
    ),
)


@pytest.mark.parametrize(("change", "scenario", "caught_by"), MUTANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mutant_of_the_carrier_is_caught(
    change: Callable[[Patch], None], scenario: Callable[[], Outcome], caught_by: str, monkeypatch: Patch
) -> None:
    change(monkeypatch)
    error = scenario().error
    assert error is not None, "the mutant lives"
    assert error.kind == caught_by, error


@pytest.mark.parametrize("scenario", [scenario for _, scenario, _ in MUTANTS], ids=lambda value: value.__name__)
def test_a_scenario_of_one_host_passes_without_a_mutant(scenario: Callable[[], Outcome]) -> None:
    error = scenario().error
    assert error is None, error


@pytest.mark.parametrize("mutant", BELOW, ids=lambda mutant: mutant.change.__name__)
def test_the_named_test_of_memory_fails_with_the_mutant_and_passes_without(mutant: Below, monkeypatch: Patch) -> None:
    run_named(mutant)
    mutant.change(monkeypatch)
    with pytest.raises(AssertionError):
        run_named(mutant)
