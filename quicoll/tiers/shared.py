"""State that the ranks share by name, in one of two consistencies: `Job.shared_state` makes it.

    "strong"     for what training computes with. It changes by committed steps alone, on all ranks by the same values:
                 their digest is in the vote, and a step in which they differ is committed nowhere. It belongs to the
                 job's registered state, by `state` and `load_state`
    "eventual"   for cold tiers and archives. Any rank writes a piece at any time; the newest version wins, by an order
                 that all ranks compute alike (quicoll.tiers.pieces); pieces spread in the background, whether steps are
                 committed or not (quicoll.tiers.spreading). `strong()` makes it strong for a step that uses it

How an eventual state is made strong. All ranks of the view call `strong`, in a step:

    pinned      each rank keeps what it has at this moment for the others, whatever is written meanwhile
    compared    a digest of all versions from each rank. Where all are equal, that was all
    listed      otherwise every rank tells its versions; the newest of each piece is what all will have
    pulled      who lacks one of them fetches just this version from a rank that told it, until the deadline
    confirmed   every rank tells what it still lacks. Nothing: each returns the same bits. Something: each raises
                PiecesMissing, with the same words
    forgotten   then all hold the same deletions, and forget those that are old (quicoll.tiers.settling)

Invariants. What `strong` returns is the same on all ranks, bit for bit: the versions are results that all ranks have,
and so in the vote of the step, and each piece has the digest of its version. It contains every write that had come to
any rank of the view before it was called there. A write that has come to no rank of the view is not in it: one of a
rank that is lost or cut off counts when it is heard of again. What was deleted on a rank of the view, or made strong
without it, is not in it.

Failures. A rank lost or cut off on the way: PeerError of the exchange it misses, and the step is aborted, as always. A
holder that is lost while others pull from it: another holder, else the deadline. Ranks that name different states:
LocalError on all of them. A listing that is malformed: PeerError, naming its rank.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

import xxhash

from quicoll.checks import seconds
from quicoll.errors import LocalError, PiecesMissing
from quicoll.tiers.pieces import MAX_PIECES, PieceStore, SharedPiece, deleted_as, packed, unpacked
from quicoll.tiers.settling import (
    MAX_LACK,
    PieceLack,
    PieceListing,
    PieceSummary,
    Settlement,
    newest_horizon,
    next_horizon,
    settlement,
)
from quicoll.tiers.spreading import Pulled
from quicoll.tiers.telling import exchanged

if TYPE_CHECKING:
    from quicoll.collectives.context import CallContext
    from quicoll.collectives.group import Group
    from quicoll.engine.runtime import Runtime
    from quicoll.membership.view import View
    from quicoll.tiers.pieces import Horizon
    from quicoll.tiers.spreading import Spreader

__all__ = ["CommittingStep", "Consistency", "SharedState"]

T = TypeVar("T")
Consistency: TypeAlias = Literal["strong", "eventual"]
"""When all ranks have the same; see the module's head."""

_VOTED = 3  # the group id under which the vote has what is staged: no group's, so it meets no operation's result
_SHOWN = 4  # pieces and nodes that an error names
_DELETED = b"deleted"  # what the vote has of a piece that is deleted: no value's digest has its length


class CommittingStep(Protocol):
    """What is needed of a step here: `quicoll.Step`, or its blocking mirror."""

    def on_commit(self, callback: Callable[[], None]) -> None:
        """Run a function if, and only if, the step is committed."""
        ...


class SharedState:
    """See the module's head. `Job.shared_state` makes it, on every rank by the same arguments. Not thread-safe.

    Attributes:
        name: Its name, the same on all ranks.
        consistency: "strong" or "eventual".
    """

    def __init__(
        self,
        name: str,
        consistency: Consistency,
        *,
        group: Group,
        context: CallContext,
        runtime: Runtime,
        spreader: Spreader,
        committed_step: Callable[[], int],
        max_bytes: int,
    ) -> None:
        self.name = name
        self.consistency = consistency
        self._group = group
        self._context = context
        self._runtime = runtime
        self._spreader = spreader
        self._committed_step = committed_step
        self._max_bytes = max_bytes
        self._values: dict[str, Any] = {}  # of a strong one
        self._sizes: dict[str, int] = {}  # bytes of each of them
        self._staged_by: CommittingStep | None = None  # the step that staged last
        self._staged_sizes: dict[str, int] = {}  # as they are when it is committed
        self._store = PieceStore(max_bytes)  # of an eventual one, for the engine's loop alone

    def __repr__(self) -> str:
        return f"<SharedState {self.name!r} {self.consistency}>"

    @property
    def store(self) -> PieceStore:
        """The pieces of an eventual state, for quicoll's own use: on the engine's loop alone."""
        return self._store

    # -- strong --------------------------------------------------------------------------------------------------

    def stage(self, step: CommittingStep, values: Mapping[str, Any], *, delete: Sequence[str] = ()) -> None:
        """Change pieces of a strong state by a step: on all ranks when it is committed, on none when it is not.

        Every rank calls it in the same step with equal values. They are compared by the step's vote, at no cost of a
        message; where they differ, the step is aborted on all ranks, naming the odd one, and nothing has changed.

        Args:
            step: The open step.
            values: Arrays, tensors or bytes, by the names of their pieces. They are copied here.
            delete: Names of pieces that go. One that is not there is passed over.
        Raises:
            LocalError: The state is eventual, no step is open, a value cannot be a piece or does not fit, or a piece is
                both written and deleted.
        """
        self._demand("strong", "write(values) changes an eventual state")
        if self._context.step is None:
            raise LocalError("a strong state changes by a step: stage(step, values) inside of one")
        gone = _names_of(delete, values)
        pieces = {name: packed(name, value) for name, value in values.items()}
        before = self._staged_sizes if self._staged_by is step else self._sizes
        sizes = {name: size for name, size in before.items() if name not in gone}
        sizes |= {name: piece.entry.nbytes for name, piece in pieces.items()}
        self._demand_room(sizes)
        new = {name: unpacked(piece) for name, piece in pieces.items()}
        step.on_commit(lambda: self._put(new, gone, sizes))
        self._staged_by, self._staged_sizes = step, sizes
        digests = {name: piece.entry.version.digest for name, piece in pieces.items()} | dict.fromkeys(gone, _DELETED)
        for name in sorted(digests):
            seq = xxhash.xxh3_64_intdigest(f"{self.name}\0{name}".encode()) >> 1
            self._context.record(_VOTED, seq, digests[name])

    def _put(self, new: Mapping[str, Any], gone: Sequence[str], sizes: dict[str, int]) -> None:
        """At a commit. Nothing here can fail, so no state is half changed."""
        for name in gone:
            self._values.pop(name, None)
        self._values |= new
        self._sizes = sizes
        self._staged_by = None if self._staged_sizes is sizes else self._staged_by

    def _demand_room(self, sizes: Mapping[str, int]) -> None:
        if sum(sizes.values()) > self._max_bytes or len(sizes) > MAX_PIECES:
            raise LocalError(
                f"the shared state {self.name!r} would have {len(sizes)} pieces of {sum(sizes.values())} bytes: "
                f"at most {MAX_PIECES}, and max_bytes={self._max_bytes}"
            )

    def state(self) -> dict[str, Any]:
        """Return the pieces of a strong state: a part of the job's state, for the `save` of `register_state`.

        Raises:
            LocalError: The state is eventual, so it is not the same on all ranks.
        """
        self._demand("strong", "an eventual state is no part of the registered one, which is equal on all ranks")
        return {name: self._values[name] for name in sorted(self._values)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over the pieces of a strong state, in the `load` of `register_state`.

        Args:
            state: What `state` returned, on another rank or before a restart.
        Raises:
            LocalError: The state is eventual, or a value cannot be a piece, or they do not fit. Nothing has changed.
        """
        self._demand("strong", "write(values) changes an eventual state")
        pieces = {name: packed(name, value) for name, value in state.items()}
        sizes = {name: piece.entry.nbytes for name, piece in pieces.items()}
        self._demand_room(sizes)
        self._values = {name: unpacked(piece) for name, piece in pieces.items()}
        self._sizes, self._staged_by = sizes, None

    # -- eventual ------------------------------------------------------------------------------------------------

    def known_step(self) -> int:
        """Return the last step that this rank knows to be committed: of its state, or when its view began."""
        return max(self._committed_step(), self._context.view.committed_step)

    async def write(self, values: Mapping[str, Any], *, delete: Sequence[str] = ()) -> None:
        """Write and delete pieces of an eventual state, on any rank, in a step or outside of one.

        That is newer than what this rank has seen of the same pieces, and spreads from here.

        Args:
            values: Arrays, tensors or bytes, by the names of their pieces. They are copied here.
            delete: Names of pieces that go. One that has not come here is passed over.
        Raises:
            LocalError: The state is strong, a value cannot be a piece or does not fit, or a piece is both written and
                deleted. Nothing was written.
        """
        self._demand("eventual", "stage(step, values) changes a strong state")
        gone = _names_of(delete, values)
        pieces = {name: packed(name, value) for name, value in values.items()}
        step, writer = self.known_step(), self._context.config.node

        async def put() -> None:
            self._store.write(pieces, step=step, writer=writer, delete=gone)

        await self._runtime.call(put())

    async def read(self) -> dict[str, Any]:
        """Return the pieces as this rank has them now, in memory of their own, in the order of their names.

        Those of an eventual state may be others on other ranks, and older than what a rank has written already.
        """
        if self.consistency == "strong":
            return {name: unpacked(packed(name, value)) for name, value in self.state().items()}

        async def look() -> dict[str, SharedPiece]:
            return self._store.pieces()

        there = await self._runtime.call(look())
        return {name: unpacked(piece) for name, piece in there.items() if not piece.entry.deleted}

    # -- made strong ---------------------------------------------------------------------------------------------

    async def strong(self, *, timeout: float | None = None) -> dict[str, Any]:
        """Return the same pieces on all ranks, bit for bit: the newest that any of them has. Every rank calls it.

        Call it inside of the step that uses them: what is returned is in the step's vote then. For a strong state it
        is `read`, and nothing is sent.

        Args:
            timeout: Seconds for fetching what this rank lacks; None takes the job's.
        Returns:
            The pieces, in memory of their own, in the order of their names.
        Raises:
            PiecesMissing: A rank could not get a piece in time. Every rank raises it, naming who lacks what.
            LocalError: The ranks make different states strong, or the timeout is none.
            QuicollError: As any collective.
        """
        within = self._context.config.timeout if timeout is None else seconds(timeout)
        if self.consistency == "strong":
            return await self.read()
        pins: list[dict[str, SharedPiece]] = []
        over = False

        async def pin(horizon: Horizon | None = None) -> PieceSummary:
            """Of what is pinned. horizon: the newest of all ranks; what nobody was given is written anew by it."""
            if over:  # the caller was cancelled before this came to run
                raise asyncio.CancelledError
            if horizon is not None:
                self._store.renew(horizon)
            pins.append(self._store.pin())
            return PieceSummary(self.name, self._store.digest, self._store.horizon, self.known_step())

        def unpin() -> None:
            nonlocal over
            over = True
            for pinned in pins:
                self._store.unpin(pinned)

        try:
            mine = await self._runtime.call(pin())
            summaries = await self._exchanged(mine)
            horizon = newest_horizon(summaries, self._context.view, mine.step)
            if mine.horizon < horizon:
                await self._runtime.call(pin(horizon))
            pieces = await self._settled(pins[-1], summaries, horizon, within)
        finally:
            with suppress(RuntimeError):  # the loop has been closed
                self._runtime.loop.call_soon_threadsafe(unpin)
        return {name: unpacked(piece) for name, piece in pieces.items() if not piece.entry.deleted}

    async def _settled(
        self, pinned: dict[str, SharedPiece], summaries: list[PieceSummary], horizon: Horizon, within: float
    ) -> dict[str, SharedPiece]:
        view = self._context.view
        if len({summary.digest: None for summary in summaries}) == 1:
            entries = {name: piece.entry for name, piece in pinned.items()}
            await self._forget(Settlement(entries, {}, entries, horizon), next_horizon(summaries, entries, view))
            return pinned
        mine = PieceListing(tuple(piece.entry for piece in pinned.values()))
        found = settlement(summaries, await self._exchanged(mine), view, horizon)
        pulled = await self._runtime.call(self._pull(found, within))
        # The slowest of the others pulls for as long as this rank may have; only then does it tell what it lacks.
        lacks = await self._exchanged(self._lack(pulled), within + self._context.config.timeout)
        self._demand_all(lacks, view)
        await self._forget(found, next_horizon(summaries, found.newest, view))
        return {name: pulled.pieces[name] if name in pulled.pieces else pinned[name] for name in found.newest}

    async def _pull(self, found: Settlement, within: float) -> Pulled:
        """On the engine's loop: come to hold the newest pieces. The values that it lacks are fetched."""
        self._store.settle(found.known, found.horizon)
        node = self._context.config.node
        pieces, lacking, wanted = {}, {}, []
        for name, entry in found.newest.items():
            if node in found.holders[name]:
                continue
            if not entry.deleted:
                wanted.append((entry, found.holders[name]))
                continue
            pieces[name] = deleted_as(entry)
            if self._store.wants(entry, found.horizon) and not self._store.merge(pieces[name], found.horizon):
                lacking[name] = self._store.no_room(entry)
        pulled = await self._spreader.pull(self.name, wanted, horizon=found.horizon, timeout=within)
        return Pulled({**pieces, **pulled.pieces}, {**lacking, **pulled.lacking})

    async def _forget(self, found: Settlement, after: Horizon | None) -> None:
        """All ranks hold the newest pieces: forget deletions."""
        if after is None:
            return
        kept = found.kept(after)

        async def settle() -> None:
            self._store.settle(kept, after)

        await self._runtime.call(settle())

    async def _exchanged(self, mine: T, timeout: float | None = None) -> list[T]:
        what = f"the shared state {self.name!r}"
        return await exchanged(self._group, mine, view=self._context.view, what=what, timeout=timeout)

    @staticmethod
    def _lack(found: Pulled) -> PieceLack:
        reason = next(iter(found.lacking.values()), "")
        return PieceLack(tuple(found.lacking), reason.encode(errors="replace").decode()[:MAX_LACK])

    def _demand_all(self, lacks: list[PieceLack], view: View) -> None:
        lacking = {node: lack for node, lack in zip(view.nodes, lacks, strict=True) if lack.pieces}
        if not lacking:
            return
        said = []
        for node, lack in list(lacking.items())[:_SHOWN]:
            more = f" and {len(lack.pieces) - _SHOWN} more" if len(lack.pieces) > _SHOWN else ""
            said.append(f"{node} lacks {', '.join(map(repr, lack.pieces[:_SHOWN]))}{more} ({lack.reason})")
        more = f"; and {len(lacking) - _SHOWN} more ranks" if len(lacking) > _SHOWN else ""
        raise PiecesMissing(
            f"the shared state {self.name!r} is not strong: {'; '.join(said)}{more}",
            state=self.name,
            lacking={node: lack.pieces for node, lack in lacking.items()},
            view=view.view_id,
        )

    def _demand(self, consistency: Consistency, otherwise: str) -> None:
        if self.consistency != consistency:
            raise LocalError(f"the shared state {self.name!r} is {self.consistency}: {otherwise}")


def _names_of(delete: Sequence[str], values: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of pieces that go, each once."""
    if isinstance(delete, str) or not all(isinstance(name, str) for name in delete):
        raise LocalError(f"delete: a sequence of names, not {delete!r}")
    both = [name for name in delete if name in values]
    if both:
        raise LocalError(f"pieces are both written and deleted: {', '.join(map(repr, both[:_SHOWN]))}")
    return tuple(dict.fromkeys(delete))
