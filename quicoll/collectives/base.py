"""What all collectives of a group share: who calls, how an operation starts, how a result is handed over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import xxhash

from quicoll.audit.recorder import Deed
from quicoll.checks import whole
from quicoll.collectives.subgroups import STATE
from quicoll.engine.calls import site_numbers
from quicoll.engine.messages import MAX_NUMBER
from quicoll.errors import LocalError
from quicoll.numerics.buffers import memory

if TYPE_CHECKING:
    from quicoll.collectives.context import Caller
    from quicoll.collectives.handle import Handle
    from quicoll.collectives.subgroups import Scope
    from quicoll.engine.calls import Call
    from quicoll.membership.view import View
    from quicoll.numerics.bundle import Joined
    from quicoll.numerics.dtypes import Array

__all__ = ["MAX_BYTES", "Issuer", "even_rows", "rows_given", "rows_text"]

_MAX_TEXT = 200  # of counts in an audit

T = TypeVar("T")

# What peers may make us allocate for one result whose size they have a say in.
MAX_BYTES = 1 << 40


class Issuer:
    """The base of `Group`. Its ranks are numbered from 0; `_scope` says which of the view's they are."""

    def __init__(self, caller: Caller, scope: Scope) -> None:
        self._caller = caller
        self._scope = scope

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._caller.rank if self._scope.ranks is None else self._scope.rank

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return self._caller.world_size if self._scope.ranks is None else len(self._scope.ranks)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The group's ranks, by their number in it, as ranks of the view: rank k of the group is `ranks[k]` there."""
        return tuple(range(self._caller.world_size)) if self._scope.ranks is None else self._scope.ranks

    @property
    def _view(self) -> View:
        """The caller's view. Raises LocalError when the group belongs to another one."""
        view, made_in = self._caller.view, self._scope.view_id
        if made_in is not None and made_in != view.view_id:
            raise LocalError(
                f"group {self._scope.name} was made in view {made_in}, the view is {view.view_id}: its ranks are not "
                "those of now; split again in every view"
            )
        return view

    @property
    def _sites(self) -> tuple[int, ...]:
        return site_numbers(self._view, self._scope.ranks)

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
        terms: str = "",
        inputs: Sequence[tuple[int, Array | Joined]] = (),
        equal: Callable[[], Array] | None = None,
        own: Callable[[], Array] | None = None,
        group: int | None = None,
    ) -> Handle[T]:
        """Issue `call`.

        op, terms, inputs: what an audit tells of it (`quicoll.audit.recorder.Deed`). equal: gives flat memory that has
        to hold the same bits on all ranks once it has ended. own: gives that of a result which is this rank's alone.
        group: another id to count it under. Raises LocalError when the group belongs to another view.
        """
        view_id, scope = self._view.view_id, self._scope
        if call.counts and max(call.counts) > MAX_NUMBER:
            raise LocalError(f"{max(call.counts)} is more than can be announced; {MAX_NUMBER} is the most")
        if scope.name:
            ranks = scope.ranks if call.ranks is None else call.ranks
            signature = f"{call.signature} group={scope.name}"
            watched = call.watched and scope.watched
            call = replace(call, signature=signature, ranks=ranks, where=scope.name, watched=watched)
        digest = None if equal is None else lambda: xxhash.xxh3_128_digest(memory(equal()))
        where = scope.group_id if group is None else group
        deed = None
        if scope.group_id != STATE.group_id:  # the library's own, when a view begins, is not for the user to compare
            deed = Deed(
                scope.name or "world",
                op,
                inputs,
                own if equal is None else equal,
                agreed=equal is not None,
                terms=terms,
                members=0 if call.ranks is None else len(call.ranks),
            )
        return self._caller.issue(
            call, view_id=view_id, group=where, timeout=timeout, deliver=deliver, digest=digest, deed=deed
        )

    def _rank(self, name: str, rank: int) -> int:
        """A rank of this group that the caller named. Raises LocalError where it is none."""
        rank = whole(rank, name)
        if not 0 <= rank < self.world_size:
            raise LocalError(f"{name} {rank} is not a rank of a world of {self.world_size}")
        return rank

    def _view_rank(self, rank: int) -> int:
        """The view's number of a rank of this group: errors name ranks of the view."""
        return rank if self._scope.ranks is None else self._scope.ranks[rank]


def even_rows(rows: int, world: int) -> tuple[int, ...]:
    """ceil(rows / world) for each rank as long as there are any: the last ones may get fewer, or none."""
    each = -(-rows // world)
    return tuple(max(0, min(each, rows - each * rank)) for rank in range(world))


def rows_given(counts: Sequence[int] | None, rows: int, world: int) -> tuple[int, ...]:
    """The caller's `counts`, checked to be `rows` in all, or `even_rows`. Raises LocalError."""
    if counts is None:
        return even_rows(rows, world)
    try:
        given = tuple(whole(count, "a count") for count in counts)
    except TypeError:
        raise LocalError(f"counts are integers, one for each rank, not {counts!r}") from None
    if len(given) != world or min(given) < 0 or sum(given) != rows:
        raise LocalError(f"counts {given} do not divide {rows} rows between {world} ranks")
    return given


def rows_text(rows: Sequence[int]) -> str:
    """How a call divides rows, for an audit; of many a digest stands for the rest. "" where that is `even_rows`."""
    if not rows or tuple(rows) == even_rows(sum(rows), len(rows)):
        return ""
    text = ",".join(map(str, rows))
    if len(text) > _MAX_TEXT:
        text = f"{text[:100]}... for {len(rows)} ranks, {xxhash.xxh3_64_hexdigest(text.encode())}"
    return f"counts={text}"
