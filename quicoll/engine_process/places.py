"""Where the tensors of a call lie, in memory that a rank's program and the process of its engine have both mapped: the
program's arena (quicoll.local.arena), of which tensors of `quicoll.empty` are part anyway.

    there     a tensor that lies in the arena is read, or written, where it is
    copied    another one is copied to memory of the arena before the call is told, and a result from there after its
              end, where that was a good one: of a call that has failed nothing is seen

Invariant: memory that a call was told of is used for nothing else before its end was told, or the process has ended.
What was used is kept for the next calls of about its size, _KEPT bytes of it at most: fresh pages cost more than a
copy. Sizes are rounded up, so that calls of ever other sizes keep few blocks, which are looked through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from quicoll.engine.calls import Work
from quicoll.engine_process.words import WorkWord
from quicoll.numerics.bundle import Joined
from quicoll.numerics.recycled import Recycler
from quicoll.numerics.reduce import ReduceOp
from quicoll.numerics.type_names import type_name, type_named

if TYPE_CHECKING:
    from quicoll.engine_process.plans import ValuesHeard, ValuesTold
    from quicoll.engine_process.words import ArenaPlace
    from quicoll.numerics.dtypes import Array
    from quicoll.plan import Plan

__all__ = ["CallMemory", "Lending", "TensorPlaces", "work_of"]

_KEPT: Final = 128 << 20
_LEAST: Final = 64 << 10
_NOWHERE: Final[ArenaPlace] = (1, 0)


class Lending(Protocol):
    """The arena, as the engine's process has it."""

    def lent(self, place: int, nbytes: int) -> Array | None: ...


class OwnArena(Protocol):
    """The arena, as the program has it."""

    def take(self, nbytes: int) -> Array: ...
    def place(self, values: Array) -> int: ...


class CallMemory:
    """Memory of one call. word: its work as it is told."""

    def __init__(self, word: WorkWord, taken: list[Array], output: Array, copy: Array | None) -> None:
        """Keep it.

        Args:
            word: The work.
            taken: Memory of the arena that is the call's.
            output: Where the result belongs.
            copy: Where it comes, unless it is `output` itself.
        """
        self.word = word
        self.taken = taken
        self._output = output
        self._copy = copy

    def bring(self) -> None:
        """The call has ended well: have its result where it belongs."""
        if self._copy is not None:
            np.copyto(self._output, self._copy[: self._output.nbytes].view(self._output.dtype))


class TensorPlaces:
    """For the program. On one loop."""

    def __init__(self, arena: OwnArena, plans: ValuesTold[Plan]) -> None:
        """Begin with nothing taken.

        Args:
            arena: The program's.
            plans: Those that the engine knows.
        """
        self._arena = arena
        self._plans = plans
        self._recycler = Recycler(_KEPT, allocate=arena.take)

    def of(self, work: Work) -> CallMemory:
        """Return the memory of a call, with what it reads in it.

        Args:
            work: The call's, with its plan and the caller's memory.
        Raises:
            MemoryError: There is none.
        """
        taken: list[Array] = []
        inputs = tuple([self._input(each, taken) for each in work.inputs])
        output, copy = work.output, None
        place = self._place(output)
        if place is None:
            copy = self._take(output.nbytes)
            taken.append(copy)
            place = self._arena.place(copy), output.nbytes
        number, told = self._plans.word(work.plan)
        word = WorkWord(number, told, type_name(work.dtype), type_name(work.acc), work.op.value, inputs, place)
        return CallMemory(word, taken, output, copy)

    def _input(self, given: Array | Joined, taken: list[Array]) -> tuple[ArenaPlace, ...]:
        pieces = given.pieces(0, given.size) if isinstance(given, Joined) else [given]
        places = [self._place(each) for each in pieces]
        known = [each for each in places if each is not None]
        if len(known) == len(places):
            return tuple(known)
        nbytes = sum(each.nbytes for each in pieces)
        memory = self._take(nbytes)
        taken.append(memory)
        at = 0
        for each in pieces:
            np.copyto(memory[at : at + each.nbytes].view(each.dtype), each)
            at += each.nbytes
        return ((self._arena.place(memory), nbytes),)

    def _place(self, values: Array) -> ArenaPlace | None:
        """Where it lies in the arena; None where it does not."""
        if not values.nbytes:
            return _NOWHERE
        place = self._arena.place(values) if values.flags.c_contiguous else 0
        return (place, values.nbytes) if place else None

    def _take(self, nbytes: int) -> Array:
        step = max(_LEAST, 1 << max(0, nbytes.bit_length() - 4))  # an eighth more at most, or the least
        return self._recycler.take(-(-nbytes // step) * step)


def work_of(word: WorkWord, arena: Lending, plans: ValuesHeard[Plan]) -> Work:
    """Return the work that was told, for the engine.

    Args:
        word: It.
        arena: The program's.
        plans: Those that are known.
    Raises:
        ValueError: A place is outside of the arena.
    """
    dtype, acc = type_named(word.dtype), type_named(word.acc)

    def at(place: ArenaPlace) -> Array:
        found = arena.lent(*place) if place[1] else np.empty(0, np.uint8)
        if found is None:
            raise ValueError(f"place {place} is outside of the arena")
        return found.view(dtype.storage)

    inputs = [at(each[0]) if len(each) == 1 else Joined(list(map(at, each))) for each in word.inputs]
    return Work(plans.value(word.plan, word.told), dtype, acc, ReduceOp(word.op), inputs, at(word.output))
