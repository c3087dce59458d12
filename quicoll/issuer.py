"""What all collectives of a group share: who calls, how an operation starts, how a result is handed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import xxhash

from quicoll.auditing import Deed
from quicoll.buffers import memory
from quicoll.errors import LocalError

if TYPE_CHECKING:
    from quicoll.bundle import Joined
    from quicoll.caller import Caller
    from quicoll.dtypes import Array
    from quicoll.handle import Handle
    from quicoll.mesh import Call

__all__ = ["MAX_BYTES", "Issuer", "even_rows", "rows_given"]

T = TypeVar("T")

# What peers may make us allocate for one result whose size they have a say in.
MAX_BYTES = 1 << 40


class Issuer:
    """The base of `Group`."""

    def __init__(self, caller: Caller, *, group_id: int, audited: str | None) -> None:
        """audited: the group's name in an audit; None where it is not for the user to compare."""
        self._caller = caller
        self._id = group_id
        self._audited = audited

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
        op: str,
        inputs: Sequence[tuple[int, Array | Joined]] = (),
        equal: Callable[[], Array] | None = None,
        own: Callable[[], Array] | None = None,
        group: int | None = None,
    ) -> Handle[T]:
        """Issue `call`.

        op, inputs: what an audit tells of it (`quicoll.auditing.Deed`). equal: gives flat memory that has to hold the
        same bits on all ranks once it has ended. own: gives that of a result which is this rank's alone.
        """
        digest = None if equal is None else lambda: xxhash.xxh3_128_digest(memory(equal()))
        where = self._id if group is None else group
        deed = None
        if self._audited is not None:
            deed = Deed(self._audited, op, inputs, own if equal is None else equal, agreed=equal is not None)
        return self._caller.issue(call, group=where, timeout=timeout, deliver=deliver, digest=digest, deed=deed)

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
