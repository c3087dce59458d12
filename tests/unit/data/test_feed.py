"""Samples that are read ahead: which are kept, which are asked for again, and that each is paired with its index."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from data_ranks import Attempted, shards_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from quicoll.data import Feed, Portion, Sampler
from quicoll.data.portions import Position
from quicoll.errors import LocalError

if TYPE_CHECKING:
    from quicoll.data.feed import Lists


class Ahead:
    """A loader that reads `ahead` lists before it gives a batch, as worker processes do. read: what it was asked."""

    def __init__(self, lists: Lists, ahead: int = 4) -> None:
        self.lists = lists
        self.ahead = ahead
        self.begun = 0
        self.read: list[list[int]] = []

    def __iter__(self) -> Iterator[np.ndarray]:
        self.begun += 1
        waiting: list[list[int]] = []
        for indices in self.lists:
            self.read.append(indices)
            waiting.append(indices)
            if len(waiting) > self.ahead:
                yield 10 * np.array(waiting.pop(0))


def fed(length: int = 20, *, batch: int = 4, shards: int = 2, ahead: int = 4) -> Feed:
    return Feed(Sampler(length, batch_size=batch, shards=shards, seed=3), lambda lists: Ahead(lists, ahead))


def right(parts: Iterable[Portion]) -> list[int]:
    """The indices, and each sample belongs to its index."""
    found: list[int] = []
    for part in parts:
        if part.indices.size:
            assert np.asarray(part.samples).tolist() == (10 * part.indices).tolist()
        else:
            assert part.samples is None
        found += part.indices.tolist()
    return found


def take(feed: Feed, rank: int = 0, world: int = 1, *, commits: bool = True) -> list[int]:
    step = Attempted()
    found = right(feed.take(step, shards_of(rank, world, feed.sampler.shards)))
    if commits:
        step.commit()
    return found


def test_committed_steps_are_read_on_and_on_over_the_end_of_epochs() -> None:
    feed = fed()
    epochs = [[sample for _ in range(5) for sample in take(feed)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert feed.loader.begun == 1


def test_an_attempt_that_is_repeated_has_the_samples_that_were_read_for_it() -> None:
    feed = fed()
    take(feed)
    first = take(feed, commits=False)
    assert take(feed, commits=False) == first
    assert take(feed) == first
    assert take(feed) != first
    assert feed.loader.begun == 1
    assert len(feed.loader.read) == len({tuple(read) for read in feed.loader.read})  # nothing was asked for twice


def test_what_was_read_ahead_for_other_shards_is_asked_for_again_by_who_has_them_now() -> None:
    feeds = [fed(), fed()]
    for feed in feeds:
        take(feed, feeds.index(feed), 2)
    lost = [take(feed, rank, 2, commits=False) for rank, feed in enumerate(feeds)]
    alone = take(feeds[0], 0, 1)  # rank 1 is gone: its shards are rank 0's
    assert alone == lost[0] + lost[1]
    assert feeds[0].loader.begun == 2
    rest = [take(feeds[0], 0, 1) for _ in range(3)]
    assert len({*alone, *(sample for part in rest for sample in part)}) == 16


def test_a_state_that_is_handed_over_begins_the_loader_anew_where_it_stands() -> None:
    one, other = fed(), fed()
    for _ in range(3):
        take(one)
    take(other)
    other.sampler.load_state(one.sampler.state())
    assert take(other) == take(one)
    assert other.loader.begun == 2


def test_several_takes_in_one_step_are_all_repeated_with_it() -> None:
    feed = fed()
    shards = shards_of(0, 1, 2)

    def twice(*, commits: bool) -> list[int]:
        step = Attempted()
        found = right(feed.take(step, shards)) + right(feed.take(step, shards))
        if commits:
            step.commit()
        return found

    first = twice(commits=False)
    assert len(set(first)) == 8
    assert twice(commits=True) == first
    assert not set(take(feed)) & set(first)
    assert feed.loader.begun == 1


@given(
    deeds=st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=1, max_size=40),
    length=st.integers(1, 23),
    ahead=st.integers(0, 9),
)
@settings(max_examples=30, deadline=None)
def test_through_any_aborts_and_views_each_sample_is_used_once_in_an_epoch(
    deeds: list[tuple[bool, int]], length: int, ahead: int
) -> None:
    feeds = [fed(length, batch=6, shards=3, ahead=ahead) for _ in range(5)]
    used: list[int] = []
    for commits, world in deeds:
        for feed in feeds[1:]:
            feed.sampler.load_state(feeds[0].sampler.state())
        steps = [Attempted() for _ in range(world)]
        taken = [right(feeds[rank].take(step, shards_of(rank, world, 3))) for rank, step in enumerate(steps)]
        if commits:
            used += [sample for part in taken for sample in part]
            for step in steps:
                step.commit()
    whole = len(used) // length * length
    for start in range(0, whole, length):
        assert sorted(used[start : start + length]) == list(range(length))
    assert len(set(used[whole:])) == len(used) - whole


def test_what_is_looked_at_ahead_of_the_commits_is_read_once_and_the_data_moves_with_the_commit_alone() -> None:
    feed, shards, step = fed(), shards_of(0, 1, 2), Attempted()
    ahead = [feed.sampler.position]
    for _ in range(3):
        ahead.append(feed.sampler.after(ahead[-1]))
    looked = [right(feed.portions(each, shards)) for each in ahead[:3]]
    feed.sampler.advance(step, ahead[3])
    assert feed.sampler.position == ahead[0]
    assert [right(feed.portions(each, shards)) for each in ahead[:3]] == looked  # of an attempt that was aborted
    step.commit()
    assert feed.sampler.position == ahead[3]
    assert sorted([*chain(*looked), *take(feed), *take(feed)]) == list(range(20))
    assert feed.loader.begun == 1


def test_several_runs_of_shards_have_what_each_has_by_itself() -> None:
    feed = fed(batch=8, shards=4)
    runs = [replace(shards_of(0, 1, 4), first=first, count=1) for first in (3, 0)]
    found = feed.portions(feed.sampler.position, *runs)
    assert [each.shard for each in found] == [3, 0]
    assert right(found) == right(each for run in runs for each in fed(batch=8, shards=4).portions(Position(), run))
    with pytest.raises(LocalError, match="this data has 4 shards, not 2"):
        feed.portions(feed.sampler.position, runs[0], shards_of(0, 1, 2))


def test_a_rank_without_samples_reads_nothing() -> None:
    feed = fed(3, batch=8, shards=8)
    step = Attempted()
    parts = feed.take(step, shards_of(0, 8, 8))
    assert [part.indices.size for part in parts] == [0]
    assert feed.take(Attempted(), shards_of(8, 9, 8)) != ()
    assert feed.take(Attempted(), shards_of(0, 9, 8)) == ()
    assert feed.loader.begun <= 1


class Frail(Ahead):
    """It fails at its second list, once."""

    def __iter__(self) -> Iterator[np.ndarray]:
        for number, batch in enumerate(super().__iter__()):
            if number == 1 and self.begun == 1:
                raise OSError("the disk is away")
            yield batch


def test_a_loader_that_failed_is_begun_anew() -> None:
    feed = Feed(Sampler(20, batch_size=4, shards=2, seed=3), Frail)
    with pytest.raises(OSError, match="the disk is away"):
        take(feed)
    found = [sample for _ in range(5) for sample in take(feed)]
    assert sorted(found) == list(range(20))
    assert feed.loader.begun == 2


def test_a_loader_that_ends_is_an_error() -> None:
    feed = Feed(Sampler(20, batch_size=4, shards=2, seed=3), lambda lists: [np.array([1])])
    with pytest.raises(LocalError, match="has ended"):
        take(feed)


def test_a_loader_that_cannot_be_right_is_refused() -> None:
    sampler = Sampler(8, batch_size=4, shards=2, seed=3)
    data = torch.arange(8)
    with pytest.raises(LocalError, match="pass batch_sampler=lists"):
        Feed(sampler, lambda lists: DataLoader(data, batch_size=4))
    with pytest.raises(LocalError, match="in_order"):
        Feed(sampler, lambda lists: DataLoader(data, batch_sampler=lists, in_order=False))
    with pytest.raises(LocalError, match="only once"):
        Feed(sampler, lambda lists: iter([lists]))
    with pytest.raises(LocalError, match="read by the feed"):
        iter(Feed(sampler, lambda lists: lists).loader)


def test_torchs_loader_in_this_process_gives_what_its_lists_say() -> None:
    feed = Feed(
        Sampler(20, batch_size=4, shards=2, seed=3),
        lambda lists: DataLoader(10 * torch.arange(20), batch_sampler=lists),
    )
    first = take(feed, 0, 2)
    aborted = take(feed, 0, 2, commits=False)
    rest = [*take(feed, 0, 1), *take(feed, 0, 1)]
    assert rest[:2] == aborted
    assert len({*first, *rest}) == 10


def test_a_closed_feed_begins_anew() -> None:
    feed = fed()
    take(feed)
    feed.close()
    take(feed)
    assert feed.loader.begun == 2
