"""Mutants of what a worker promises: its data, its steps, its state, divided or not, and a spare's copies of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from named_tests import Below

import quicoll.state.reading
import quicoll.state.warm_blocks
import quicoll.train.worker
from quicoll.data.sampler import Sampler
from quicoll.membership.view import View, natural_key
from quicoll.numerics.seed import Seed
from quicoll.state.layout import Layout
from quicoll.state.pieces import HeldPieces
from quicoll.state.rank_state import RankState
from quicoll.state.reading import PlacedState
from quicoll.train.divided import Moments
from quicoll.train.figures import WorkerFigures
from quicoll.train.moving import MovingBuffers
from quicoll.train.worker import Worker

if TYPE_CHECKING:
    import pytest

    Patch = pytest.MonkeyPatch

__all__ = ["WORKER_MUTANTS"]


def the_barrier_between_forward_and_backward_is_left_out(patch: Patch) -> None:
    leaves = Worker._leaves

    async def hasty(self: Worker, *given: Any) -> Any:
        self._phase_barrier = False
        return await leaves(self, *given)

    patch.setattr(Worker, "_leaves", hasty)


def a_rank_computes_one_of_its_shards_twice(patch: Patch) -> None:
    parts = Worker._parts

    def doubled(self: Worker, *given: Any) -> Any:
        found = parts(self, *given)
        return [found[0], *found[:1], *found[2:]]

    patch.setattr(Worker, "_parts", doubled)


def all_shards_draw_the_same_numbers(patch: Patch) -> None:
    patch.setattr(Seed, "for_shard", lambda self, index: self)


def an_update_is_applied_before_its_step_is_committed(patch: Patch) -> None:
    honest = Worker._update

    async def hasty(self: Worker, *given: Any) -> Any:
        (await honest(self, *given))()
        return lambda: None

    patch.setattr(Worker, "_update", hasty)


def parts_count_alike_whatever_they_have_of_samples(patch: Patch) -> None:
    leaf = Worker._leaf
    patch.setattr(Worker, "_leaf", lambda self, loss, weight: leaf(self, loss, 1.0 if weight else 0.0))


def a_job_that_starts_anew_begins_its_data_anew(patch: Patch) -> None:
    patch.setattr(Sampler, "load_state", lambda self, state: None)


def a_job_that_starts_anew_counts_from_the_step_before(patch: Patch) -> None:
    resume = Worker._resume

    async def behind(self: Worker) -> int | None:
        found = await resume(self)
        if found:
            self._job.resume_from(found - 1)
        return found

    patch.setattr(Worker, "_resume", behind)


def what_ranks_train_is_not_compared(patch: Patch) -> None:
    register = RankState.register

    def silent(self: RankState, *given: Any, **options: Any) -> None:
        register(self, *given[:4], **{name: value for name, value in options.items() if name != "architecture"})

    patch.setattr(RankState, "register", silent)


def any_checkpoint_is_taken(patch: Patch) -> None:
    patch.setattr(quicoll.train.worker, "demand_state", lambda *given: None)


def steps_that_were_aborted_count_among_those_that_were_committed(patch: Patch) -> None:
    patch.setattr(WorkerFigures, "lost", WorkerFigures.committed)


def statistics_move_on_each_rank_by_its_own_parts(patch: Patch) -> None:
    """As torch does by itself: what a forward pass has moved stays."""

    @contextmanager
    def careless(self: MovingBuffers) -> Iterator[list[Any]]:
        before = {name: value.clone() for name, value in self.values().items()}
        moves: list[Any] = []
        yield moves
        moves.extend((value - before[name]).float() for name, value in self.values().items())

    patch.setattr(MovingBuffers, "attempt", careless)


def a_block_has_two_owners(patch: Patch) -> None:
    owned = Layout.owned

    def wide(self: Layout, rank: int) -> range:
        found = owned(self, rank)
        return range(found.start, min(found.stop + 1, self.blocks)) if found else found

    patch.setattr(Layout, "owned", wide)


def an_attempt_that_is_aborted_moves_the_moments(patch: Patch) -> None:
    update = Moments.update

    def in_place(self: Moments, average: Any) -> Any:
        values, kept = update(self, average)
        for each, memory in zip(kept.values(), self.sharded.pieces.region, strict=True):
            memory[:] = each
        return values, kept

    patch.setattr(Moments, "update", in_place)


def what_a_spare_was_given_counts_as_it_is(patch: Patch) -> None:
    """Without a look at the digest."""
    look = HeldPieces.look

    def credulous(self: HeldPieces, block: int) -> bool:
        if not look(self, block) and block in self._coming:
            self._blocks[block] = self._coming.pop(block)
        return block in self._blocks

    patch.setattr(HeldPieces, "look", credulous)


def a_spare_has_the_blocks_of_the_first_step_for_ever(patch: Patch) -> None:
    offer = HeldPieces.offer

    def lazy(self: HeldPieces, block: int, piece: int, data: Any) -> None:
        if block not in self._coming or not np.any(self._coming[block][piece]):
            offer(self, block, piece, data)

    patch.setattr(HeldPieces, "offer", lazy)


def a_spare_guesses_its_place_from_the_names_of_the_ranks(patch: Patch) -> None:
    def guessed(view: View, spare: str) -> tuple[int, ...]:
        at = sum(natural_key(node) < natural_key(spare) for node in view.nodes[: view.workers])
        return tuple(place for place in (at - 1, at) if 0 <= place < view.workers)

    patch.setattr(quicoll.state.warm_blocks, "next_places", guessed)


def a_disk_without_the_manifest_is_not_read(patch: Patch) -> None:
    async def nothing(*given: Any) -> None:
        pass

    patch.setattr(quicoll.state.reading, "_indexed", nothing)


def a_begin_asks_nobody_but_the_ranks_that_are_to_keep_a_block(patch: Patch) -> None:
    read = PlacedState.read
    asked: list[PlacedState] = []

    async def once(self: PlacedState, blocks: Sequence[int]) -> None:
        if self not in asked:
            asked.append(self)
            await read(self, blocks)

    patch.setattr(PlacedState, "read", once)


_WORKER, _SIM = "unit/train/test_worker.py", "sim/test_worker.py"

WORKER_MUTANTS = (
    Below(
        the_barrier_between_forward_and_backward_is_left_out,
        _WORKER,
        "test_where_asked_no_rank_begins_backward_before_all_have_ended_forward",
    ),
    Below(
        a_rank_computes_one_of_its_shards_twice,
        _WORKER,
        "test_a_rank_computes_its_own_shards_and_none_more_than_once",
    ),
    Below(
        all_shards_draw_the_same_numbers,
        _WORKER,
        "test_random_numbers_are_those_of_the_step_and_the_shard_on_whichever_rank_it_is",
    ),
    Below(
        an_update_is_applied_before_its_step_is_committed,
        _WORKER,
        "test_an_aborted_step_leaves_no_trace_and_is_begun_again",
    ),
    Below(
        parts_count_alike_whatever_they_have_of_samples,
        _WORKER,
        "test_the_average_is_that_of_the_samples_also_where_shards_have_different_numbers_of_them",
    ),
    Below(a_job_that_starts_anew_begins_its_data_anew, _WORKER, "test_where_the_data_stands_is_in_the_checkpoint"),
    Below(
        a_job_that_starts_anew_counts_from_the_step_before,
        _WORKER,
        "test_a_job_that_starts_anew_goes_on_from_the_checkpoint_to_the_same_bits",
    ),
    Below(
        what_ranks_train_is_not_compared,
        _SIM,
        "test_one_that_trains_something_else_is_refused_at_the_start_and_the_others_go_on",
    ),
    Below(any_checkpoint_is_taken, _WORKER, "test_a_checkpoint_of_another_architecture_is_refused"),
    Below(
        steps_that_were_aborted_count_among_those_that_were_committed,
        _WORKER,
        "test_figures_say_where_the_time_went",
    ),
    Below(
        statistics_move_on_each_rank_by_its_own_parts,
        "unit/train/test_torch_task.py",
        "test_running_statistics_move_at_the_commit_by_the_mean_of_what_the_parts_move_them_by",
    ),
    Below(
        a_block_has_two_owners,
        "unit/state/test_layout.py",
        "test_every_block_has_one_owner_and_its_keepers_are_different_ranks",
    ),
    Below(
        an_attempt_that_is_aborted_moves_the_moments,
        _SIM,
        "test_an_aborted_step_changes_nothing_of_a_divided_state_of_which_there_are_no_copies",
    ),
    Below(
        a_begin_asks_nobody_but_the_ranks_that_are_to_keep_a_block,
        _SIM,
        "test_a_job_that_was_killed_whole_goes_on_from_what_is_on_any_of_its_disks",
    ),
    Below(
        a_disk_without_the_manifest_is_not_read,
        _SIM,
        "test_a_job_that_was_killed_as_its_manifest_was_written_goes_on_though_one_disk_alone_has_it",
    ),
    Below(
        a_spare_guesses_its_place_from_the_names_of_the_ranks,
        "unit/state/test_warm_blocks.py",
        "test_a_spare_goes_by_the_place_that_the_coordinator_has_told_whatever_the_names_are",
    ),
    Below(
        what_a_spare_was_given_counts_as_it_is,
        "sim/test_spares.py",
        "test_copies_with_other_bits_are_fetched_again_and_change_nothing",
    ),
    Below(
        a_spare_has_the_blocks_of_the_first_step_for_ever,
        "sim/test_spares.py",
        "test_a_warm_spare_has_the_blocks_of_the_place_of_an_owner_that_is_killed_and_gets_none_of_them",
    ),
)
