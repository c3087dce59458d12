"""Error feedback: what encoding loses of a leaf is kept in its residual, and sent along with what the leaf is next.

Seide et al. 2014 ("1-bit stochastic gradient descent", Interspeech) and Karimireddy et al. 2019 (arXiv 1901.09847): the
errors of a lossy format then cancel over the steps instead of adding up, which formats of few bits need. Of a leaf x
with its residual r, both of type T, with C for encoding and decoding, and fl for one rounding to T:

    sent    t = fl(x + r), encoded: every rank reduces C(t) where it would reduce C(x)
    kept    r' = fl(t - C(t)), and 0 where that is not finite: an overflow is seen in the result, and does not stay

A residual belongs to its leaf, that is to a logical shard, and never to a rank: the bits that leave it depend on what
its leaf has been, not on who held it or how many ranks there were. It is one rank's own affair otherwise: nothing of it
travels, and ranks need not agree on whether there is one.

    made        on the caller's thread: all is checked here, and nothing of the caller's is written
    encoded     r' lies in memory beside r
    committed   r is r'. The operation has succeeded, or the step in which it was called has been committed
    dropped     r is what it was

Invariants: r changes by `commit` and by nothing else, at once and as a whole; `commit` does not compute, so it fails
only where the caller has meanwhile resized r or made it read-only. What makes wrong residuals is refused when they are
given: two of them in one place, or one in the place of x or out, would be written twice or change an input; r in use by
an operation under way (quicoll.collectives.context) would lose an update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.errors import LocalError
from quicoll.numerics.buffers import reach, source
from quicoll.numerics.destinations import Destination, destination
from quicoll.numerics.dtypes import FLOAT32, FLOAT64, Array, DType, narrow_unguarded, require_ieee, widen_unguarded
from quicoll.numerics.overlap import Reach, first_shared, meet, reach_of

if TYPE_CHECKING:
    from quicoll.numerics.bundle import Bundle
    from quicoll.numerics.encoding import Encoding
    from quicoll.numerics.recycled import Recycler

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """The residuals of the leaves that one operation of one rank is given."""

    __slots__ = ("_form", "_leaves", "_places", "_reaches", "_read")

    def __init__(
        self,
        residuals: Sequence[Any],
        leaves: Sequence[Bundle],
        form: Encoding,
        *,
        apart_from: Sequence[Any],
        recycler: Recycler | None = None,
    ) -> None:
        """Check the residuals.

        Args:
            residuals: For each leaf a tensor, or a list of them where leaves are lists.
            leaves: The leaves.
            form: How they travel.
            apart_from: Tensors that must not share memory with a residual.
            recycler: Gives memory that has been used before, for large residuals.
        Raises:
            LocalError: A residual does not fit its leaf, cannot be written, or shares memory.
        """
        self._leaves = leaves
        self._form = form
        self._places: list[list[Destination]] = []
        self._read: list[list[Array]] = []
        for residual, leaf in zip(residuals, leaves, strict=True):
            tensors = _tensors(residual, leaf)
            self._places.append(
                [
                    destination(tensor, leaf.first, shape, recycler=recycler, name="residual")
                    for tensor, shape in zip(tensors, leaf.shapes, strict=True)
                ]
            )
            self._read.append([source(tensor).flat for tensor in tensors])
        written = [place.place for places in self._places for place in places if place.size]
        if first_shared(written) is not None:
            raise LocalError("two tensors of residual share memory; give each leaf, and each tensor of it, its own")
        self._reaches = [reach_of(place) for place in written]
        if meet(self._reaches, [reach(value) for value in apart_from]):
            raise LocalError("residual shares memory with x or out; give it memory of its own")

    def encode(self) -> list[Array]:
        """Return each leaf encoded with its residual, and work out what is left of it. The caller's memory stays."""
        require_ieee()
        encoded: list[Array] = []
        for number in range(len(self._leaves)):
            sums = self._sums(number)
            wire = self._form.encode_numbers(sums)
            encoded.append(wire)
            back = [np.empty_like(each) for each in sums]
            self._form.decode_numbers(wire, back)
            for place, given, got in zip(self._places[number], sums, back, strict=True):
                left = place.flat.view(self._form.part.storage)
                _rounded(np.subtract, given, got, self._form.part, left, finite=True)
        return encoded

    def sums(self, number: int) -> list[Array]:
        """Return what leaf `number` of this rank is with its residual, of the tensors' type; before `commit`."""
        storage = self._leaves[number].dtype.storage
        return [each.view(storage) for each in self._sums(number)]

    def commit(self) -> None:
        """Write what is left to the caller's tensors. Raises LocalError where one was resized or made read-only."""
        for places in self._places:
            for place in places:
                place.commit()

    def reaches(self) -> list[Reach]:
        """Return where the caller's residuals lie that may still be written; none once they are released."""
        return self._reaches

    def release(self) -> None:
        """Nobody has to keep off the residuals any more: what is to be written is written next, or never."""
        self._reaches = []

    def _sums(self, number: int) -> list[Array]:
        """x + r of a leaf, as numbers, tensor by tensor."""
        part, sums = self._form.part, []
        for values, kept in zip(self._leaves[number].flats, self._read[number], strict=True):
            total = np.empty(values.view(part.storage).size, part.storage)
            _rounded(np.add, values.view(part.storage), kept.view(part.storage), part, total)
            sums.append(total)
        return sums


def _tensors(residual: Any, leaf: Bundle) -> Sequence[Any]:
    """The tensors of one leaf's residual. Raises LocalError where there are more or fewer than the leaf has."""
    listed = isinstance(residual, list | tuple)
    if listed != leaf.many or (listed and len(residual) != len(leaf.shapes)):
        expected = f"a list of {len(leaf.shapes)} tensors" if leaf.many else "a tensor"
        found = f"a list of {len(residual)}" if listed else f"a {type(residual).__name__}"
        raise LocalError(f"residual is {found} for a leaf that is {expected}")
    return residual if listed else (residual,)


def _rounded(
    operation: Callable[..., Any], left: Array, right: Array, part: DType, out: Array, *, finite: bool = False
) -> None:
    """Add or subtract, rounded once to `part`. finite: what is not becomes 0.

    16-bit types go through float32, which has the 2 p + 2 digits with which the second rounding does no harm (Figueroa
    1995, "When is double rounding innocuous?").
    """
    with np.errstate(all="ignore"):
        if part in (FLOAT32, FLOAT64):
            operation(left, right, out=out)
            if finite:
                _drop_strange(out)
            else:
                narrow_unguarded(out, part, part, out)  # any NaN becomes the one
            return
        wide = np.empty(out.size, np.float32), np.empty(out.size, np.float32)
        widen_unguarded(left, part, FLOAT32, wide[0])
        widen_unguarded(right, part, FLOAT32, wide[1])
        operation(*wide, out=wide[0])
        if finite:
            _drop_strange(wide[0])
        narrow_unguarded(wide[0], FLOAT32, part, out)


def _drop_strange(values: Array) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        values[~finite] = 0
