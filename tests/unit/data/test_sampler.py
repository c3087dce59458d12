"""Each sample once in an epoch, by what was committed: through commits, aborts, restarts and any world sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from data_ranks import Attempted, SampledRanks, exactly_once, shards_of
from hypothesis import given, settings
from hypothesis import strategies as st

from quicoll.data import Position, Sampler
from quicoll.errors import LocalError
from quicoll.numerics.seed import Seed
from quicoll.state.tree import flatten

if TYPE_CHECKING:
    from quicoll.collectives.shards import Shards

DEEDS = st.one_of(
    st.tuples(st.just("world"), st.integers(1, 8)),
    st.tuples(st.just("restart"), st.just(0)),
    st.tuples(st.just("abort"), st.integers(1, 2)),
    st.tuples(st.just("commit"), st.integers(1, 2)),
)


@given(
    deeds=st.lists(DEEDS, min_size=1, max_size=40),
    length=st.integers(1, 40),
    shards=st.integers(1, 5),
    each=st.integers(1, 3),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
@settings(max_examples=50, deadline=None)
def test_through_any_commits_aborts_restarts_and_world_sizes_each_sample_is_used_once_in_an_epoch(
    deeds: list[tuple[str, int]], length: int, shards: int, each: int, shuffle: bool, drop_last: bool
) -> None:
    batch = shards * each
    length = max(length, batch) if drop_last else length
    ranks = SampledRanks(
        lambda: Sampler(length, batch_size=batch, shards=shards, seed=5, shuffle=shuffle, drop_last=drop_last)
    )
    for deed, number in deeds:
        if deed == "world":
            ranks.world(number)
        elif deed == "restart":
            ranks.restart()
        else:
            ranks.step(commits=deed == "commit", takes=number)
    exactly_once(ranks, length, length % batch if drop_last else 0)
    assert len(ranks.used) == sum(number for deed, number in deeds if deed == "commit")


def test_a_position_that_moves_before_the_commit_is_found() -> None:
    """The same check bites: a sampler that counts what it has taken loses the samples of an aborted step."""

    class Hasty(Sampler):
        def reserve(self, step: Any, shards: Shards) -> Position:
            before = self.position
            super().reserve(Attempted(), shards)
            self._move(self.after(before))
            return before

    ranks = SampledRanks(lambda: Hasty(12, batch_size=4, shards=2, seed=5))
    ranks.step(commits=True)
    ranks.step(commits=False)
    ranks.step(commits=True)
    ranks.step(commits=True)
    with pytest.raises(AssertionError):
        exactly_once(ranks, 12)


def test_which_samples_make_a_leaf_does_not_depend_on_the_world_size() -> None:
    sampler = Sampler(50, batch_size=16, shards=8, seed=Seed(3))
    position = Position(4, 3)
    alone = [part.indices.tolist() for part in sampler.portions(position, shards_of(0, 1, 8))]
    for world in (2, 3, 8, 11):
        parts = [part for rank in range(world) for part in sampler.portions(position, shards_of(rank, world, 8))]
        assert [part.indices.tolist() for part in parts] == alone


def test_each_epoch_and_each_name_has_an_order_of_its_own() -> None:
    def epoch(number: int, name: str = "", seed: int = 1) -> list[int]:
        sampler = Sampler(30, batch_size=30, shards=1, seed=seed, name=name)
        return sampler.portions(Position(number, 0), shards_of(0, 1, 1))[0].indices.tolist()

    orders = [epoch(0), epoch(1), epoch(0, "validation"), epoch(0, seed=2)]
    assert all(sorted(order) == list(range(30)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert epoch(0) == orders[0]


def test_an_epoch_that_was_begun_is_ended_in_its_own_order_where_the_job_has_another_seed() -> None:
    before = Sampler(12, batch_size=4, shards=2, seed=1)
    step = Attempted()
    used = [part.indices.tolist() for part in before.take(step, shards_of(0, 1, 2))]
    step.commit()
    after = Sampler(12, batch_size=4, shards=2, seed=2)
    after.load_state(before.state())
    for _ in range(2):
        step = Attempted()
        used += [part.indices.tolist() for part in after.take(step, shards_of(0, 1, 2))]
        step.commit()
    assert sorted(sample for part in used for sample in part) == list(range(12))
    assert (after.epoch, int(after.seed)) == (1, 1)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"length": 13}, "length is 13 here and was 12"),
        ({"batch_size": 6}, "batch_size is 6 here and was 4"),
        ({"batch_size": 6, "shards": 3}, "batch_size is 6 here and was 4; shards is 3 here and was 2"),
        ({"shuffle": False}, "shuffle is 0 here and was 1"),
        ({"drop_last": True}, "drop_last is 1 here and was 0"),
        ({"name": "other"}, "name is 'other' here and was ''"),
    ],
)
def test_data_that_has_changed_is_refused_by_name_and_nothing_is_loaded(changed: dict[str, Any], said: str) -> None:
    before = Sampler(12, batch_size=4, shards=2, seed=1)
    step = Attempted()
    before.take(step, shards_of(0, 1, 2))
    step.commit()
    other = Sampler(**{"length": 12, "batch_size": 4, "shards": 2, "seed": 9} | changed)
    with pytest.raises(LocalError, match=f"not the one that this job has begun with.*: {said}$"):
        other.load_state(before.state())
    assert (other.position, int(other.seed)) == (Position(0, 0), 9)


@pytest.mark.parametrize("wrong", [{"epoch": -1}, {"step": 3}, {"step": -1}, {"step": 1.0}, {"seed": -1}])
def test_a_state_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    sampler = Sampler(12, batch_size=4, shards=2, seed=1)
    with pytest.raises(LocalError):
        sampler.load_state(sampler.state() | wrong)
    with pytest.raises(LocalError, match="no 'step'"):
        sampler.load_state({"epoch": 0})
    assert sampler.state() == Sampler(12, batch_size=4, shards=2, seed=1).state()


def test_its_state_is_part_of_a_jobs_state() -> None:
    sampler = Sampler(12, batch_size=4, shards=2, seed=1)
    before = flatten({"data": sampler.state()})
    step = Attempted()
    sampler.take(step, shards_of(0, 1, 2))
    assert flatten({"data": sampler.state()}).digest == before.digest
    step.commit()
    after = flatten({"data": sampler.state()})
    assert after.digest != before.digest
    assert after.kind_digest == before.kind_digest


def test_shards_of_another_number_are_refused() -> None:
    sampler, step = Sampler(12, batch_size=4, shards=2, seed=1), Attempted()
    with pytest.raises(LocalError, match=r"2 shards, not 4: job.group.shards\(2\)"):
        sampler.take(step, shards_of(0, 1, 4))
    assert step.actions == []
