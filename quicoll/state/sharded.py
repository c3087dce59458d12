"""State of which each rank owns a part: declared by its user, given new values in a step.

    moments = quicoll.Sharded(len(weights), {"m": "float32", "v": "float32"}, blocks=64, backup=1)
    job.register_state(save, load, sharded={"adam": moments})
    ...
    async with job.step() as step:
        gradient = await job.group.reduce_scatter(leaves, counts=moments.counts, op="avg")
        m, v, part = adam(moments["m"], moments["v"], weights[moments.mine], gradient)
        await moments.stage(step, {"m": m, "v": v})
        new = await job.group.all_gather(part, counts=moments.counts)
        step.on_commit(lambda: np.copyto(weights, new))

One attempt to give new values:

    stage    on every rank, in the step. Values are copied; a digest of each block goes to all ranks, and is part of the
             step's vote; the values go to the ranks that keep a copy, which compare them with the digests
    commit   with the step, and on every rank: what it owns and keeps are the new values, and the record (pieces.py) has
             their digests. So a backup is never of another step than its owner's blocks, and never ahead of a decision
    abort    what was staged is forgotten

In a new view the blocks come to whoever is to own and keep them before a step begins (redistribution.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from quicoll.checks import plain, whole
from quicoll.errors import Corrupted, LocalError
from quicoll.numerics.buffers import source, wrap
from quicoll.numerics.dtypes import DType
from quicoll.state.layout import Layout
from quicoll.state.pieces import BlockUpdate, HeldPieces, PieceSpec

if TYPE_CHECKING:
    from quicoll.collectives.group import Group
    from quicoll.membership.view import View
    from quicoll.numerics.buffers import ArrayKind
    from quicoll.numerics.dtypes import Array

__all__ = [
    "MAX_BLOCKS",
    "MAX_INDEX_BYTES",
    "PieceGroups",
    "PieceIndex",
    "ReadPiece",
    "Sharded",
    "ShardedSet",
    "StagingStep",
    "layout_in",
]

MAX_BLOCKS = 1 << 16
MAX_INDEX_BYTES = 256 << 20

ReadPiece = Callable[[int, str, int, int], Any]
"""Return elements [start, stop) of a piece as they are after a step: `read(step, name, start, stop)`."""


class PieceIndex(Protocol):
    """What `read` needs to find pieces on its disk, and may lack where it has the pieces: a checkpoint's manifest."""

    def of_step(self, step: int) -> bytes | None:
        """Return what is known of a step; None where nothing is. At most MAX_INDEX_BYTES."""

    def take(self, step: int, index: bytes) -> None:
        """Read by what another rank has returned of a step."""


class StagingStep(Protocol):
    """What is needed of an open step."""

    @property
    def number(self) -> int:
        """Its number."""

    @property
    def view(self) -> View | None:
        """The view in which it runs."""

    def on_commit(self, callback: Callable[[], None]) -> None:
        """Run a function if the step is committed."""


@dataclass(frozen=True, slots=True)
class PieceGroups:
    """All ranks of the present view: for what is compared by the step's vote, and for blocks that go from rank to rank.
    up and down: to a higher and to a lower one, so that what goes both ways between two ranks is numbered apart."""

    world: Group
    up: Group
    down: Group

    def between(self, giver: int, receiver: int) -> Group:
        return self.up if giver < receiver else self.down


class Sharded:
    """A state whose pieces are divided between the ranks: tensors of one axis and one length, by name.

    The axis is cut into blocks, as many on any number of ranks, and each rank owns a run of them: those of
    `job.group.shards(blocks)`. When the ranks change, blocks go to their new owners before the next step begins, from
    whoever holds them as of the last committed step.

    Attributes:
        backup: How many further ranks keep a copy of each block.
        read: As it was given.
        index: What goes to ranks whose `read` lacks it; None: there is no such thing. For the library.
        pieces: What is held here, for the library.
    """

    def __init__(
        self,
        length: int,
        pieces: Mapping[str, str],
        *,
        blocks: int,
        backup: int = 0,
        read: ReadPiece | None = None,
        renew: bool = False,
        by_site: bool = False,
        torch: bool = False,
    ) -> None:
        """Declare a state, equally on all ranks. Without `read` it is zeros before the first step.

        Args:
            length: Elements along the axis.
            pieces: The element type of each piece, by name: `{"m": "float32", "v": "float32"}`.
            blocks: Into how many the axis is cut, 1 to 65536: the least that moves between ranks, and at least as many
                as the job will ever have ranks.
            backup: How many further ranks keep a copy of each block, which they get in every step that gives new
                values. With 1, the loss of one rank loses nothing.
            read: Returns elements [start, stop) of a piece as after a step: `read(step, name, start, stop)`, a plain
                function. Called for step 0, for the step of `resume_from`, and for blocks that were lost with the ranks
                that held them; raises anything where it has not that step, or not these elements. Then the other ranks
                are asked to read them, and give them to this one; but not for step 0. What it gives for a lost block is
                taken only if it has the digest that its owner told.
            renew: What becomes of blocks that were lost with all ranks that held them, and that `read` has not: True:
                zeros, on all ranks alike, and the job goes on. False: ShardLost, and no step begins.
            by_site: Whether the ranks of a site (`site=` of `quicoll.join`) compute the same blocks: blocks are dealt
                to the sites, all ranks of one hold and stage what is its, with the same bits, and nothing is copied
                between them. So a block is lost with the last rank of its site; `backup` is of further sites then.
            torch: Whether values come as torch tensors on the host, otherwise numpy arrays.
        Raises:
            LocalError: An argument cannot be used.
        """
        length, blocks, backup = whole(length, "length"), whole(blocks, "blocks"), whole(backup, "backup")
        if length < 0 or not 1 <= blocks <= MAX_BLOCKS or backup < 0:
            raise LocalError(
                f"length and backup are not negative, blocks 1 to {MAX_BLOCKS}: {length}, {backup}, {blocks}"
            )
        if not pieces or not all(map(_named, pieces)):
            raise LocalError(f'pieces are element types by name: {{"m": "float32"}}, not {pieces!r}')
        dtypes = {name: DType.parse(pieces[name]) for name in sorted(pieces)}
        self.backup = backup
        self.read = None if read is None else plain(read, "read")
        self.index: PieceIndex | None = None
        self.pieces = HeldPieces(PieceSpec(length, blocks, dtypes, backup, bool(renew), bool(by_site)))
        self._kind: ArrayKind = "torch" if torch else "numpy"
        self._groups: PieceGroups | None = None
        self._name = ""

    def __repr__(self) -> str:
        return f"<Sharded {self._name} {self.pieces.spec.text}, here {self.mine.start} to {self.mine.stop}>"

    @property
    def mine(self) -> slice:
        """The elements that this rank owns in the present view; by site, those of its site."""
        return slice(*self.pieces.spec.bounds(self.pieces.owned))

    @property
    def counts(self) -> tuple[int, ...]:
        """How many elements each rank of the present view owns, by rank; for `reduce_scatter(counts=...)`."""
        return tuple(stop - start for start, stop in self.bounds(self._attached().world.world_size))

    def bounds(self, world_size: int) -> tuple[tuple[int, int], ...]:
        """Return the first element that each rank owns and the one after its last, on so many ranks.

        Args:
            world_size: Number of ranks.
        Raises:
            LocalError: What a rank has is by site, and not by their number.
        """
        spec = self.pieces.spec
        if spec.by_site:
            raise LocalError(f"{self._name or 'this Sharded'} is by site: its ranks have the same elements")
        layout = Layout(spec.blocks, tuple(range(world_size)))
        return tuple(spec.bounds(layout.owned(rank)) for rank in range(world_size))

    def __getitem__(self, name: str) -> Any:
        """Return what this rank owns of a piece, as of the last committed step. Not to be written: see `stage`."""
        spec = self.pieces.spec
        if name not in spec.dtypes:
            raise LocalError(f"there is no piece {name!r}; there are {', '.join(spec.dtypes)}")
        flat = self.pieces.region[list(spec.dtypes).index(name)][:]
        value = wrap(flat, spec.dtypes[name], flat.shape, self._kind)
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
        return value

    async def stage(self, step: StagingStep, values: Mapping[str, Any]) -> None:
        """Give this rank's part new values, if the step is committed. Every rank calls it, at one place in the step.

        Args:
            step: The open step.
            values: By name, for all pieces: tensors of as many elements as this rank owns.
        Raises:
            LocalError: The state is not registered, no step is open, or a value is not of its type and size.
            PeerError: A rank was lost.
            Corrupted: A copy that came, or by site what this rank has computed itself, is not what its owner told.
        """
        groups, view, spec = self._attached(), step.view, self.pieces.spec
        if view is None or not step.number:
            raise LocalError(f"{self._name}: values are staged inside of a step")
        rank, layout, held = groups.world.rank, layout_in(view, spec), self.pieces.owned
        new = self._copied(values)
        rows = {block: spec.digests(spec.part(new, held, block)) for block in held}
        mine = [rows[block] for block in layout.owned(rank)]
        width = len(spec.dtypes) * 16
        told = groups.world.all_gather(
            np.concatenate(mine).reshape(-1, width) if mine else np.empty((0, width), np.uint8),
            counts=[len(layout.owned(each)) for each in range(len(view.members))],
        )
        copies = await self._exchange(groups, layout, new)
        digests = await told
        rows |= {block: spec.digests(parts) for block, parts in copies.items()}
        for block, row in rows.items():
            if not np.array_equal(row, digests[block]):
                owner = layout.owner(block)
                what = "came to its backup" if block in copies else "was computed by a peer of its owner"
                raise Corrupted(
                    f"block {block} of {self._name} {what} other than its owner told",
                    rank=owner,
                    node=view.nodes[owner],
                    view=view.view_id,
                    step=step.number,
                    odd=(owner, rank),
                )
        owners = tuple(
            tuple(view.nodes[each] for each in layout.together(place)) for place in range(len(layout.owners))
        )
        update = BlockUpdate(step.number, owners, held, new, copies, digests)
        step.on_commit(partial(self.pieces.commit, update))

    async def _exchange(
        self, groups: PieceGroups, layout: Layout, new: tuple[Array, ...]
    ) -> dict[int, tuple[Array, ...]]:
        """Give what is staged to those that keep a copy, and return what this rank keeps a copy of."""
        spec, rank = self.pieces.spec, groups.world.rank
        given, coming = [], []
        for to, giver in layout.neighbours(rank):
            if new[0].size:
                given.append(groups.between(rank, to).send([each.view(np.uint8) for each in new], to=to))
            theirs = layout.owned(giver)
            room = [each.view(np.uint8) for each in spec.empty(theirs)]
            if room[0].size:
                coming.append((theirs, groups.between(giver, rank).recv(room, source=giver)))
        copies: dict[int, tuple[Array, ...]] = {}
        for theirs, handle in coming:
            came = [
                np.asarray(each).view(dtype.storage)
                for each, dtype in zip(await handle, spec.dtypes.values(), strict=True)
            ]
            copies.update((block, spec.part(came, theirs, block)) for block in theirs)
        for sent in given:
            await sent
        return copies

    def _copied(self, values: Mapping[str, Any]) -> tuple[Array, ...]:
        spec = self.pieces.spec
        start, stop = spec.bounds(self.pieces.owned)
        if sorted(values) != list(spec.dtypes):
            raise LocalError(
                f"{self._name} is made of {', '.join(spec.dtypes)}; staged are {', '.join(map(str, values))}"
            )
        found = []
        for name, dtype in spec.dtypes.items():
            read = source(values[name])
            if read.dtype is not dtype or read.flat.size != stop - start:
                raise LocalError(
                    f"{self._name}.{name}: {read.flat.size} elements of {read.dtype} are staged, where this rank owns "
                    f"{stop - start} of {dtype}"
                )
            found.append(read.flat if read.copied else read.flat.copy())
        return tuple(found)

    # -- for the library -------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether it takes part in a job."""
        return self._groups is not None

    def attach(self, name: str, groups: PieceGroups) -> None:
        """Take part in a job, under this name in it."""
        self._name, self._groups = name, groups

    def _attached(self) -> PieceGroups:
        if self._groups is None:
            raise LocalError("this Sharded belongs to no job: register_state(save, load, sharded={...})")
        return self._groups


class ShardedSet:
    """All sharded states of a rank, by name, in the names' order."""

    def __init__(self, states: Mapping[str, Sharded], groups: PieceGroups) -> None:
        """Look at the states of a job.

        Args:
            states: By name.
            groups: The job's ranks.
        Raises:
            LocalError: There is something else among them, or one takes part in a job already.
        """
        for name, state in states.items():
            if not (_named(name) and isinstance(state, Sharded)):
                raise LocalError(f"sharded names quicoll.Sharded objects, not {name!r}: {type(state).__name__}")
            if state.attached:
                raise LocalError(f"the Sharded {name!r} is registered already: make another one")
        self.states = {name: states[name] for name in sorted(states)}
        self.groups = groups

    def attach(self, step: int) -> None:
        """Take the states into the job. step: of the state with which this process begins."""
        for name, state in self.states.items():
            state.attach(name, self.groups)
        self.begin_at(step)

    def __iter__(self) -> Iterator[tuple[str, Sharded]]:
        return iter(self.states.items())

    @property
    def agreed(self) -> bool:
        """Whether a step was committed that gave any of them values: what this rank owns is nowhere else then."""
        return any(state.pieces.agreed for state in self.states.values())

    def begin_at(self, step: int) -> None:
        """Take note of the step of the state with which this process begins."""
        for state in self.states.values():
            state.pieces.begin_at(step)

    def records(self) -> dict[str, Any]:
        """Return what is replicated of them."""
        return {name: state.pieces.record() for name, state in self.states.items()}

    def take(self, records: Any) -> None:
        """Take what another rank holds of that.

        Raises:
            LocalError: These are not the job's.
        """
        if not isinstance(records, Mapping) or sorted(records) != list(self.states):
            raise LocalError(f"the job's sharded states are other ones than {', '.join(self.states)}")
        for name, state in self.states.items():
            try:
                state.pieces.take(records[name])
            except LocalError as error:
                raise LocalError(f"sharded state {name!r}: {error.message}") from error


def layout_in(view: View, spec: PieceSpec) -> Layout:
    """Return who owns and keeps what in a view. Who is about to leave it owns nothing, unless all are."""
    staying = [member for member in view.members if member.node not in view.parting] or list(view.members)
    if not spec.by_site:
        return Layout(spec.blocks, tuple(member.rank for member in staying), spec.backup)
    sites: dict[str, list[int]] = {}
    for member in staying:
        sites.setdefault(member.site, []).append(member.rank)
    ranks = list(sites.values())  # in the order in which they appear, so owners ascend
    return Layout(spec.blocks, tuple(each[0] for each in ranks), spec.backup, tuple(tuple(each[1:]) for each in ranks))


def _named(name: object) -> bool:
    return isinstance(name, str) and name != ""
