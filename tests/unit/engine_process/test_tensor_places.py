"""Where tensors of a call lie: there already, or copied; what is kept, and that nothing is used twice at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from plan_networks import alike, reductions

from quicoll.engine.calls import Work
from quicoll.engine_process.places import CallMemory, TensorPlaces, work_of
from quicoll.engine_process.plans import ValuesHeard, ValuesTold, plan_of, plan_row
from quicoll.errors import LocalError
from quicoll.local.arena import arena_here
from quicoll.local.sealing import unusable
from quicoll.numerics.bundle import Joined
from quicoll.numerics.dtypes import FLOAT32, FLOAT64
from quicoll.numerics.recycled import Recycler
from quicoll.numerics.reduce import ReduceOp

pytestmark = pytest.mark.skipif(bool(unusable()), reason=unusable() or "there is shared memory")

PLAN = reductions("direct", alike(2), 40_000)[0]
SIZE = 10_000


class Both:
    """The program's side and the engine's, which share a real arena."""

    def __init__(self) -> None:
        arena = arena_here()
        assert arena is not None
        self.arena = arena
        self.places = TensorPlaces(arena, ValuesTold(plan_row))
        self.heard = ValuesHeard(plan_of)

    def empty(self, size: int, dtype: Any = np.float32) -> np.ndarray:
        return self.arena.take(size * np.dtype(dtype).itemsize).view(dtype)

    def call(self, inputs: list[Any], output: np.ndarray) -> tuple[CallMemory, Work]:
        work = Work(PLAN, FLOAT32, FLOAT64, ReduceOp.AVG, inputs, output)
        memory = self.places.of(work)
        return memory, work_of(memory.word, self.arena, self.heard)


@pytest.fixture
def both() -> Both:
    return Both()


def test_what_is_elsewhere_is_copied_and_a_result_comes_when_it_is_brought(both: Both) -> None:
    x, out = np.arange(SIZE, dtype=np.float32), np.full(SIZE, -1, np.float32)
    memory, work = both.call([x], out)
    assert (work.plan, work.dtype, work.acc, work.op) == (PLAN, FLOAT32, FLOAT64, ReduceOp.AVG)
    assert np.array_equal(work.inputs[0], x)
    x[:] = 7  # it is the caller's again, and the engine does not see it
    assert work.inputs[0][1] == 1
    work.output[:] = 5
    assert (out == -1).all()
    memory.bring()
    assert (out == 5).all()


def test_what_lies_in_the_arena_is_read_and_written_where_it_is(both: Both) -> None:
    x, out = both.empty(SIZE), both.empty(SIZE)
    x[:] = 3
    memory, work = both.call([x[100:200]], out)
    assert memory.taken == []
    x[150] = 4
    assert work.inputs[0][50] == 4
    work.output[:] = 6
    assert (out == 6).all()


def test_pieces_of_a_list_are_read_where_they_are_if_all_are_there(both: Both) -> None:
    there, elsewhere = [both.empty(50) for _ in range(3)], np.ones(50, np.float32)
    for number, each in enumerate(there):
        each[:] = number
    memory, work = both.call([Joined(there)], both.empty(1))
    assert memory.taken == []
    assert isinstance(work.inputs[0], Joined)
    assert work.inputs[0][40:60].tolist() == [0.0] * 10 + [1.0] * 10
    memory, work = both.call([Joined([*there, elsewhere])], both.empty(1))
    assert len(memory.taken) == 1
    assert work.inputs[0].tolist() == [0.0] * 50 + [1.0] * 50 + [2.0] * 50 + [1.0] * 50


def test_what_is_not_contiguous_or_is_nothing_is_fine(both: Both) -> None:
    every_other, nothing = both.empty(100)[::2], np.empty(0, np.float32)
    every_other[:] = 9
    memory, work = both.call([every_other, nothing], nothing)
    assert len(memory.taken) == 1
    assert work.inputs[0].tolist() == [9.0] * 50
    assert work.inputs[1].size == work.output.size == 0


def test_memory_of_a_call_that_is_over_is_used_again_and_that_of_one_under_way_is_not(both: Both) -> None:
    x, out = np.ones(SIZE, np.float32), np.empty(SIZE, np.float32)
    first, second = both.call([x], out)[0], both.call([x], out)[0]
    used = [each.__array_interface__["data"][0] for each in (*first.taken, *second.taken)]
    assert len(set(used)) == 4
    del first
    third = both.call([x], out)[0]
    assert {each.__array_interface__["data"][0] for each in third.taken} == set(used[:2])
    fourth = both.call([x], out)[0]
    last = [each.__array_interface__["data"][0] for call in (second, third, fourth) for each in call.taken]
    assert len(set(last)) == 6


def test_calls_of_ever_other_sizes_keep_few_blocks(both: Both) -> None:
    out = np.empty(1, np.float32)
    for size in range(1, 3_000, 7):
        both.call([np.ones(size, np.float32)], out)
    assert both.places._recycler.kept <= 4 << 16
    for size in range(1 << 20, 1 << 21, 9_999):  # of twice the size at most
        both.call([np.ones(size, np.float32)], out)
    assert len(both.places._recycler._kept) <= 4 + 9


def test_a_result_whose_memory_the_engine_has_is_written_where_it_is(both: Both) -> None:
    out = Recycler(allocate=both.arena.take).take(4 * SIZE).view(np.float32)
    memory, work = both.call([both.empty(SIZE)], out)
    assert memory.taken == []
    work.output[:] = 8
    memory.bring()
    assert (out == 8).all()


def test_no_memory_is_an_error_before_anything_is_told(both: Both) -> None:
    both.places = TensorPlaces(Full(), ValuesTold(plan_row))
    with pytest.raises(MemoryError, match="full"):
        both.call([np.ones(SIZE, np.float32)], both.empty(1))


class Full:
    def take(self, nbytes: int) -> np.ndarray:
        raise MemoryError("full")

    def place(self, values: np.ndarray) -> int:
        return 0


def test_a_place_outside_of_the_arena_is_refused(both: Both) -> None:
    memory, _ = both.call([np.ones(4, np.float32)], both.empty(1))
    memory.word.inputs = (((both.arena.size, 100),),)
    with pytest.raises(ValueError, match="outside of the arena"):
        work_of(memory.word, both.arena, both.heard)
    memory.word.dtype = "float31"
    with pytest.raises(LocalError, match="float31"):
        work_of(memory.word, both.arena, both.heard)
