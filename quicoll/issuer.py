"""What all collectives of a group share: who calls, how an operation starts, how a result is handed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash

from quicoll.buffers import memory
from quicoll.errors import LocalError

if TYPE_CHECKING:
    from quicoll.bundle import Results
    from quicoll.caller import Caller
    from quicoll.handle import Handle
    from quicoll.mesh import Call

__all__ = ["MAX_BYTES", "Issuer", "even_rows", "rows_given"]

T = TypeVar("T")

# What peers may make us allocate for one result whose size they have a say in.
MAX_BYTES = 1 << 40


class Issuer:
    """The base of `Group`."""

    def __init__(self, caller: Caller, *, group_id: int) -> None:
        self._caller = caller
        self._id = group_id

    @property
    def rank(self) -> int:
        return self._caller.rank

    @property
    def world_size(self) -> int:
        return self._caller.world_size

    @property
    def _chunk_bytes(self) -> int:
        return self._caller.config.chunk_bytes

    def _start(
        self,
        call: Call,
        deliver: Callable[[], T],
        timeout: float | None,
        *,
        equal: Callable[[], Any] | None = None,
        group: int | None = None,
    ) -> Handle[T]:
        """Issue `call`. equal: gives flat memory that has to hold the same bits on all ranks once it has ended."""
        digest = None if equal is None else lambda: xxhash.xxh3_128_digest(memory(equal()))
        where = self._id if group is None else group
        return self._caller.issue(call, group=where, timeout=timeout, deliver=deliver, digest=digest)

    def _start_into(self, call: Call, target: Results, timeout: float | None, *, equal: bool) -> Handle[Any]:
        """Issue a call whose result is `target`; `equal`: the same on all ranks."""
        return self._start(call, target.commit, timeout, equal=(lambda: target.flat) if equal else None)

    def _demand_rank(self, **ranks: int) -> None:
        for name, rank in ranks.items():
            if not 0 <= rank < self.world_size:
                raise LocalError(f"{name} {rank} is not a rank of a world of {self.world_size}")


def even_rows(rows: int, world: int) -> tuple[int, ...]:
    """ceil(rows / world) for each rank as long as there are any: the last ones may get fewer, or none."""
    each = -(-rows // world)
    return tuple(max(0, min(each, rows - each * rank)) for rank in range(world))


def rows_given(counts: Sequence[int] | None, rows: int, world: int) -> tuple[int, ...]:
    """The caller's `counts`, checked to be `rows` in all, or `even_rows`. Raises LocalError."""
    if counts is None:
        return even_rows(rows, world)
    given = tuple(int(count) for count in counts)
    if len(given) != world or min(given) < 0 or sum(given) != rows:
        raise LocalError(f"counts {given} do not divide {rows} rows between {world} ranks")
    return given
