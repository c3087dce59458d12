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

Invariants. What `strong` returns is the same on all ranks, bit for bit: the versions are results that all ranks have,
and so in the vote of the step, and each piece has the digest of its version. It contains every write that had come to
any rank of the view before it was called there. A write that has come to no rank of the view is not in it: one of a
rank that is lost or cut off counts when it is heard of again.

Failures. A rank lost or cut off on the way: PeerError of the exchange it misses, and the step is aborted, as always. A
holder that is lost while others pull from it: another holder, else the deadline. Ranks that name different states:
LocalError on all of them. A listing that is malformed: PeerError, naming its rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, TypeAlias

import msgspec
import xxhash

from quicoll.checks import MAX_NAME, seconds
from quicoll.errors import LocalError, PeerError, PiecesMissing
from quicoll.tiers.pieces import (
    MAX_PIECES,
    PieceEntry,
    PieceStore,
    SharedPiece,
    newest_entries,
    packed,
    unpacked,
)

if TYPE_CHECKING:
    from quicoll.collectives.context import CallContext
    from quicoll.collectives.group import Group
    from quicoll.engine.runtime import Runtime
    from quicoll.membership.view import View
    from quicoll.tiers.spreading import Pulled, Spreader

__all__ = ["CommittingStep", "Consistency", "SharedState"]

Consistency: TypeAlias = Literal["strong", "eventual"]
"""When all ranks have the same; see the module's head."""

_VOTED = 3  # the group id under which the vote has what is staged: no group's, so it meets no operation's result
_SHOWN = 4  # pieces and nodes that an error names
_REASON = 200  # characters of a reason


class CommittingStep(Protocol):
    """What is needed of a step here: `quicoll.Step`, or its blocking mirror."""

    def on_commit(self, callback: Callable[[], None]) -> None:
        """Run a function if, and only if, the step is committed."""
        ...


_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class _Summary(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    state: _Name
    digest: Annotated[bytes, msgspec.Meta(max_length=16)]


class _Listing(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    entries: Annotated[tuple[PieceEntry, ...], msgspec.Meta(max_length=MAX_PIECES)]


class _Lack(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a rank lacks. pieces: their names. reason: of the first of them."""

    pieces: Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MAX_PIECES)]
    reason: Annotated[str, msgspec.Meta(max_length=_REASON)] = ""


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
        self._store = PieceStore(max_bytes)  # of an eventual one, for the engine's loop alone

    def __repr__(self) -> str:
        return f"<SharedState {self.name!r} {self.consistency}>"

    @property
    def store(self) -> PieceStore:
        """The pieces of an eventual state, for quicoll's own use: on the engine's loop alone."""
        return self._store

    # -- strong --------------------------------------------------------------------------------------------------

    def stage(self, step: CommittingStep, values: Mapping[str, Any]) -> None:
        """Change pieces of a strong state by a step: on all ranks when it is committed, on none when it is not.

        Every rank calls it in the same step with equal values. They are compared by the step's vote, at no cost of a
        message; where they differ, the step is aborted on all ranks, naming the odd one, and nothing has changed.

        Args:
            step: The open step.
            values: Arrays, tensors or bytes, by the names of their pieces. They are copied here.
        Raises:
            LocalError: The state is eventual, no step is open, or a value cannot be a piece or does not fit.
        """
        self._demand("strong", "write(values) changes an eventual state")
        if self._context.step is None:
            raise LocalError("a strong state changes by a step: stage(step, values) inside of one")
        pieces = {name: packed(name, value) for name, value in values.items()}
        sizes = self._sizes | {name: piece.entry.nbytes for name, piece in pieces.items()}
        if sum(sizes.values()) > self._max_bytes or len(sizes) > MAX_PIECES:
            raise LocalError(
                f"the shared state {self.name!r} would have {len(sizes)} pieces of {sum(sizes.values())} bytes: "
                f"at most {MAX_PIECES}, and max_bytes={self._max_bytes}"
            )
        for name in sorted(pieces):
            digest = pieces[name].entry.version.digest
            self._context.record(_VOTED, xxhash.xxh3_64_intdigest(f"{self.name}\0{name}".encode()) >> 1, digest)
        step.on_commit(lambda: self._put(pieces))

    def _put(self, pieces: Mapping[str, SharedPiece]) -> None:
        for name, piece in pieces.items():
            self._values[name], self._sizes[name] = unpacked(piece), piece.entry.nbytes

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
            LocalError: The state is eventual, or a value cannot be a piece.
        """
        self._demand("strong", "write(values) changes an eventual state")
        pieces = {name: packed(name, value) for name, value in state.items()}
        self._values, self._sizes = {}, {}
        self._put(pieces)

    # -- eventual ------------------------------------------------------------------------------------------------

    async def write(self, values: Mapping[str, Any]) -> None:
        """Write pieces of an eventual state, on any rank, in a step or outside of one.

        They are newer than what this rank has seen of the same pieces, and spread from here.

        Args:
            values: Arrays, tensors or bytes, by the names of their pieces. They are copied here.
        Raises:
            LocalError: The state is strong, or a value cannot be a piece or does not fit. Nothing was written.
        """
        self._demand("eventual", "stage(step, values) changes a strong state")
        pieces = {name: packed(name, value) for name, value in values.items()}
        step, writer = self._committed_step(), self._context.config.node

        async def put() -> None:
            self._store.write(pieces, step=step, writer=writer)

        await self._runtime.call(put())

    async def read(self) -> dict[str, Any]:
        """Return the pieces as this rank has them now, in memory of their own, in the order of their names.

        Those of an eventual state may be others on other ranks, and older than what a rank has written already.
        """
        if self.consistency == "strong":
            return {name: unpacked(packed(name, value)) for name, value in self.state().items()}

        async def look() -> dict[str, SharedPiece]:
            return self._store.pieces()

        return {name: unpacked(piece) for name, piece in (await self._runtime.call(look())).items()}

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

        async def pin() -> tuple[dict[str, SharedPiece], bytes]:
            return self._store.pin(), self._store.digest

        pinned, digest = await self._runtime.call(pin())
        try:
            pieces = await self._settled(pinned, digest, within)
        finally:
            with suppress(RuntimeError):  # the loop has been closed
                self._runtime.loop.call_soon_threadsafe(self._store.unpin, pinned)
        return {name: unpacked(piece) for name, piece in pieces.items()}

    async def _settled(self, pinned: dict[str, SharedPiece], digest: bytes, within: float) -> dict[str, SharedPiece]:
        view = self._context.view
        summaries = await self._told(_Summary(self.name, digest), view)
        names = {summary.state: None for summary in summaries}
        if len(names) > 1:
            raise LocalError(f"the ranks make different states strong: {', '.join(sorted(names))}")
        if all(summary.digest == digest for summary in summaries):
            return pinned
        mine = _Listing(tuple(piece.entry for piece in pinned.values()))
        listings = [listing.entries for listing in await self._told(mine, view)]
        newest = newest_entries(listings)
        holders: dict[str, list[str]] = {name: [] for name in newest}
        for node, listing in zip(view.nodes, listings, strict=True):
            for entry in listing:
                if entry == newest[entry.name]:
                    holders[entry.name].append(node)
        wanted = [(newest[name], nodes) for name, nodes in holders.items() if self._context.config.node not in nodes]
        found = await self._runtime.call(self._spreader.pull(self.name, wanted, timeout=within))
        # The slowest of the others pulls for as long as this rank may have; only then does it tell what it lacks.
        lacks = await self._told(self._lack(found), view, within + self._context.config.timeout)
        self._demand_all(lacks, view)
        return {name: pinned[name] if name not in found.pieces else found.pieces[name] for name in newest}

    async def _told(self, mine: Any, view: View, timeout: float | None = None) -> list[Any]:
        """Tell all ranks something, and return what they have told. Raises PeerError for what is malformed."""
        values = await self._group.all_gather_object(mine, timeout=timeout)
        found = []
        for rank, value in enumerate(values):
            try:
                found.append(msgspec.convert(value, type(mine), builtin_types=(bytes,)))
            except (msgspec.ValidationError, LocalError) as error:
                raise PeerError(
                    f"tells what cannot be of the shared state {self.name!r}: {error}",
                    rank=rank,
                    node=view.nodes[rank],
                    view=view.view_id,
                ) from error
        return found

    @staticmethod
    def _lack(found: Pulled) -> _Lack:
        reason = next(iter(found.lacking.values()), "")
        return _Lack(tuple(found.lacking), reason.encode(errors="replace").decode()[:_REASON])

    def _demand_all(self, lacks: list[_Lack], view: View) -> None:
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
