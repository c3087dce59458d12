"""An all_reduce of which each rank gets all leaves, encoded, and reduces them for itself: that of sparse formats.

What travels is an all_gather of bytes whose sizes all ranks know; so it has the plans, the ways through a host's memory
and the failures of one. The rest is that of every all_reduce: the signature that ranks compare, leaves and residuals,
where the result goes. It is computed on the caller's thread when the result is first looked at, from the same bytes in
the same order on every rank: `quicoll.numerics.topk` says why nothing else would do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from quicoll.collectives.reductions import AllReduce
from quicoll.engine.calls import Work
from quicoll.errors import PeerError
from quicoll.local.large import canonical_tree
from quicoll.local.passages import Moved, Routes
from quicoll.numerics.buffers import uninitialised
from quicoll.numerics.reduce import ReduceOp

if TYPE_CHECKING:
    from quicoll.engine.calls import Known
    from quicoll.local.layout import SegmentLayout
    from quicoll.local.small import Counts
    from quicoll.numerics.bundle import Results
    from quicoll.numerics.dtypes import Array

__all__ = ["GatheredAllReduce"]


class GatheredAllReduce(AllReduce):
    """`encoded_result` has the encoded leaves of all ranks, in their order."""

    def write_to(self, out: Any, target: Results) -> None:
        super().write_to(out, target)
        how = self.prepared.how
        mine = [leaf[:] for leaf in self.flats]
        self.encoded = [np.concatenate(mine) if mine else np.empty(0, how.dtype.storage)]
        self.encoded_result = uninitialised(self.prepared.elements * self.total, how.dtype, self.here.recycler)

    def prepare(self, known: Known) -> Work:
        work = super().prepare(known)
        dtype = self.prepared.how.dtype
        return Work(work.plan, dtype, dtype, ReduceOp.BOR, work.inputs, work.output)

    def combine(self, payloads: Sequence[bytes], counts: Counts) -> None:
        for giver, (payload, (start, stop)) in enumerate(zip(payloads, pairwise(self._ends()), strict=True)):
            if len(payload) != stop - start:
                why = f"gives {len(payload)} bytes where {stop - start} belong"
                raise PeerError(why, rank=self.here.ranks[giver])
            self.output[start:stop] = np.frombuffer(payload, np.uint8)

    def passage(self, layout: SegmentLayout, counts: Counts) -> Any:
        given = [held * self.prepared.elements for held in self.prepared.held]
        return Moved(layout, self.here.rank, Routes(given), self.flats[0], self.output, reads=True)

    def bits(self) -> Array:
        form = self.prepared.how.form
        if not self.decoded and form is not None:
            size = self.prepared.elements
            leaves = [self.output[at * size : (at + 1) * size] for at in range(self.total)]
            form.reduce(canonical_tree(self.total), leaves, self.like, self.prepared.op, self.target.flat)
            self.decoded = True
        return self.target.flat

    def _ends(self) -> list[int]:
        return [0, *accumulate(held * self.prepared.elements for held in self.prepared.held)]
