"""Pieces of shared state: values with a version each, and a store of them that only grows newer.

    piece      a name, a version, and a value: an array, a tensor, or bytes, as a description and its bytes
    deletion   a piece of the kind "deleted", without bytes: written, spread and compared like any other
    version    (step, counter, writer, digest), compared in this order. step, counter: greater in a write than in all
               that its writer has seen of the piece, whatever any clock says. writer, digest: an order between writes
               that knew nothing of each other
    store      for each name the newest version that has come here
    horizon    (step, view): up to where deletions have been forgotten; see below

The order is total over values: two pieces of one version have one digest, so the same bits. So a store is a map to
maxima: merging pieces in any order, any of them any number of times, gives the same store. Stores between which enough
has been exchanged are equal; what is lost on the way is asked for again (quicoll.tiers.exchange).

Why the digest is in the version: a process that lost its memory may write a version a second time, with other bits,
while the first one lives on elsewhere. Neither is the later one; they must not be taken for the same.

Why deletions are remembered, and until when. A rank that has not heard of one still gives what was deleted to others:
a name that is merely not there would be taken back. So a deletion stays, as a name and a version, until all ranks of a
view hold it and say so to each other in one exchange (quicoll.tiers.settling). Then they forget all deletions of a step
before the *horizon*: the last step that all of them had committed. A rank that was in no such view may still hold what
was deleted, so from here on

    an unknown name     is taken from a peer with an older horizon only if its version is of the horizon's step or a
                        later one. All that was deleted and forgotten is older
    every write         has the horizon's step at least, and so is newer than any deletion that was forgotten
    a store behind      goes to a peer's horizon when it has heard all names of the peer (`settle`). Of its own pieces
                        that are older than that horizon it keeps those whose names the peer has. The others were
                        deleted and forgotten meanwhile, or written by a rank that was in no view then: nobody can tell,
                        and they go. What this rank wrote and gave to nobody cannot have been deleted: that is written
                        anew

So what was deleted by a rank that has told all ranks of a view comes back on no rank, ever; and what is remembered is
bounded by MAX_PIECES, deletions included.

Invariants. A store's version of a name never becomes smaller, but for names that are settled. Its pieces have at most
`max_bytes` bytes together, and their bytes never change. A piece is merged whole, and when its bytes have the digest of
its version. A store's horizon only grows.

    failure                                       what follows
    a piece that does not fit into max_bytes      written here: LocalError. From a peer: not taken, and said so
    a description that cannot be (sizes, type)    refused by `PieceEntry`, before memory is taken
    bytes with another digest                     not merged; their sender is named (quicoll.tiers.exchange)
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
import xxhash

from quicoll.checks import MAX_NAME
from quicoll.errors import LocalError
from quicoll.numerics.buffers import source, wrap
from quicoll.numerics.dtypes import DType

if TYPE_CHECKING:
    from quicoll.numerics.dtypes import Array

__all__ = [
    "MAX_DIMENSIONS",
    "MAX_PIECES",
    "Horizon",
    "PieceEntry",
    "PieceStore",
    "PieceVersion",
    "SharedPiece",
    "deleted_as",
    "deletion",
    "newest_entries",
    "packed",
    "unpacked",
]

MAX_PIECES = 4096
"""Pieces of one shared state, deletions included."""
MAX_COUNT = 1 << 62
"""Of steps, counters and bytes in what is told of a piece."""
MAX_DIMENSIONS = 32
"""Of a piece: what every version of numpy can make."""
_DIGEST = 16

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
_Digest = Annotated[bytes, msgspec.Meta(min_length=_DIGEST, max_length=_DIGEST)]


class PieceVersion(msgspec.Struct, frozen=True, array_like=True, order=True, forbid_unknown_fields=True):
    """How new a piece is; the greater is the newer. See the module's head."""

    step: _Count
    counter: _Count
    writer: _Name
    digest: _Digest


class Horizon(msgspec.Struct, frozen=True, array_like=True, order=True, forbid_unknown_fields=True):
    """Up to where deletions have been forgotten. step: all of them are older. view: in which that was agreed."""

    step: _Count = 0
    view: _Count = 0


class PieceEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A piece without its bytes. kind "bytes" has the dtype "uint8" and one dimension. shape: of the value."""

    name: _Name
    version: PieceVersion
    kind: Literal["numpy", "torch", "bytes", "deleted"]
    dtype: Annotated[str, msgspec.Meta(max_length=32)]
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]

    def __post_init__(self) -> None:
        # msgspec turns a ValueError raised here into its own when it decodes, so this also guards the wire.
        # Without the dimensions that are 0, as numpy looks at it: it makes no array of shape (0, 2**62, 2**62).
        extent = math.prod(max(size, 1) for size in self.shape) * DType.parse(self.dtype).itemsize
        if extent > MAX_COUNT:
            raise ValueError(f"a piece of {extent} bytes")
        if self.deleted and (self.dtype, self.shape, self.version.digest) != ("uint8", (0,), _DELETED):
            raise ValueError(f"a deletion of type {self.dtype} {self.shape}")
        if self.kind == "bytes" and (self.dtype != "uint8" or len(self.shape) != 1):
            raise ValueError(f"bytes of type {self.dtype} {self.shape}")

    @property
    def deleted(self) -> bool:
        """Whether there is no value: the piece was deleted."""
        return self.kind == "deleted"

    @property
    def nbytes(self) -> int:
        """The bytes of its value."""
        return math.prod(self.shape) * DType.parse(self.dtype).itemsize


@dataclass(frozen=True, slots=True, eq=False)
class SharedPiece:
    """A piece. data: its bytes, flat, which never change."""

    entry: PieceEntry
    data: Array

    @property
    def right(self) -> bool:
        """Whether the bytes are those of the version."""
        return _digest(self.entry.kind, self.entry.dtype, self.entry.shape, self.data) == self.entry.version.digest


class PieceStore:
    """The newest version of each piece that has come to this rank. See the module's head.

    max_bytes: of all pieces together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._pieces: dict[str, SharedPiece] = {}
        self._nbytes = 0
        self._digest: bytes | None = None  # until something changes
        self._names: list[str] | None = None
        self._pinned: list[dict[str, SharedPiece]] = []
        self._untold: dict[str, None] = {}  # pieces that were written here and are nowhere else
        self._horizon = Horizon()

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def nbytes(self) -> int:
        """The bytes of all pieces."""
        return self._nbytes

    @property
    def horizon(self) -> Horizon:
        """Up to where deletions have been forgotten here."""
        return self._horizon

    @property
    def names(self) -> Sequence[str]:
        """The names of all pieces, in order; of those that were deleted as well."""
        if self._names is None:
            self._names = sorted(self._pieces)
        return self._names

    @property
    def digest(self) -> bytes:
        """16 bytes; the same for two stores if, and only if, they have one horizon and one version of each piece."""
        if self._digest is None:
            state = xxhash.xxh3_128(msgspec.msgpack.encode(self._horizon))
            for entry in self.entries():
                state.update(msgspec.msgpack.encode(entry))
            self._digest = state.digest()
        return self._digest

    def entries(self) -> list[PieceEntry]:
        """Return what there is, in the order of names."""
        return [self._pieces[name].entry for name in self.names]

    def pieces(self) -> dict[str, SharedPiece]:
        """Return all pieces of this moment, in the order of names; deletions are among them."""
        return {name: self._pieces[name] for name in self.names}

    def find(self, name: str, version: PieceVersion) -> SharedPiece | None:
        """Return a piece of just this version, pinned or not; None where there are only others, or none."""
        for pieces in (self._pieces, *self._pinned):
            piece = pieces.get(name)
            if piece is not None and piece.entry.version == version:
                return piece
        return None

    def pin(self) -> dict[str, SharedPiece]:
        """Return all pieces of this moment, in the order of names, and go on giving them to peers until `unpin`."""
        pieces = self.pieces()
        self._pinned.append(pieces)
        return pieces

    def unpin(self, pieces: dict[str, SharedPiece]) -> None:
        """Let go of what `pin` has returned."""
        self._pinned = [each for each in self._pinned if each is not pieces]

    def told(self, name: str, version: PieceVersion) -> None:
        """Note that a peer was given a piece."""
        piece = self._pieces.get(name)
        if piece is not None and piece.entry.version == version:
            self._untold.pop(name, None)

    def wants(self, entry: PieceEntry, horizon: Horizon | None = None) -> bool:
        """Return whether a piece is newer than what is here.

        Args:
            entry: The piece.
            horizon: Of who has it; None: as here. Where that is older, the piece may have been deleted and forgotten.
        """
        piece = self._pieces.get(entry.name)
        if piece is not None:
            return entry.version > piece.entry.version
        return horizon is None or horizon >= self._horizon or entry.version.step >= self._horizon.step

    def no_room(self, entry: PieceEntry) -> str:
        """Return why a piece cannot be taken, "" if it can."""
        piece = self._pieces.get(entry.name)
        if piece is None and len(self._pieces) >= MAX_PIECES:
            return f"there are {MAX_PIECES} pieces already, those included whose deletion is remembered"
        freed = 0 if piece is None else piece.entry.nbytes
        if entry.deleted:  # what takes no room, and frees some, is taken also by a store that is full
            return ""
        if self._nbytes - freed + entry.nbytes > self.max_bytes:
            return (
                f"piece {entry.name!r} of {entry.nbytes} bytes does not fit beside {self._nbytes - freed} others into "
                f"max_bytes={self.max_bytes}"
            )
        return ""

    def too_large(self, entry: PieceEntry) -> str:
        """Return why a piece cannot be held even by an empty store, "" if it can."""
        if entry.nbytes > self.max_bytes:
            return f"piece {entry.name!r} of {entry.nbytes} bytes is larger than max_bytes={self.max_bytes}"
        return ""

    def next_version(self, name: str, digest: bytes, *, step: int, writer: str) -> PieceVersion:
        """Return the version of a write that is made here now: greater than all that this store has seen of the piece.

        Args:
            name: Of the piece.
            digest: Of its value.
            step: The last step that this rank knows to be committed.
            writer: This rank's node.
        """
        seen = self._pieces[name].entry.version if name in self._pieces else None
        latest = max(step, self._horizon.step, 0 if seen is None else seen.step)
        return PieceVersion(latest, 1 if seen is None else seen.counter + 1, writer, digest)

    def write(self, values: Mapping[str, SharedPiece], *, step: int, writer: str, delete: Iterable[str] = ()) -> None:
        """Take values that this rank writes, all of them or none, and delete others.

        Args:
            values: As `packed` gives them; their versions count for nothing.
            delete: Names of pieces that go. One that is not here, or was deleted before, is passed over.
            step: As for `next_version`.
            writer: As for `next_version`.
        Raises:
            LocalError: They do not fit.
        """
        gone = dict.fromkeys(name for name in delete if name in self._pieces and not self._pieces[name].entry.deleted)
        new = []
        for name, piece in {**values, **{name: deletion(name) for name in gone}}.items():
            version = self.next_version(name, piece.entry.version.digest, step=step, writer=writer)
            if max(version.step, version.counter) > MAX_COUNT:
                raise LocalError(f"piece {name!r} has been written too often: {version.counter} times")
            new.append(SharedPiece(msgspec.structs.replace(piece.entry, version=version), piece.data))
        kept = sum(
            piece.entry.nbytes for name, piece in self._pieces.items() if name not in values and name not in gone
        )
        asked = sum(piece.entry.nbytes for piece in new)
        if kept + asked > self.max_bytes:
            raise LocalError(f"{asked} bytes do not fit beside {kept} others into max_bytes={self.max_bytes}")
        if len(self._pieces.keys() | values.keys()) > MAX_PIECES:
            remembered = sum(piece.entry.deleted for piece in self._pieces.values())
            raise LocalError(
                f"a shared state has at most {MAX_PIECES} pieces; {remembered} of those here were deleted, which "
                "strong() forgets when all ranks have heard of it"
            )
        for piece in new:
            self._put(piece)
            if piece.entry.nbytes:  # whoever hears of one without bytes has all of it, and this rank does not notice
                self._untold[piece.entry.name] = None
            else:
                self._untold.pop(piece.entry.name, None)

    def merge(self, piece: SharedPiece, horizon: Horizon | None = None) -> bool:
        """Take a piece, if it is newer than what is here. Return whether it was.

        Args:
            piece: Whole, and right.
            horizon: As for `wants`.
        """
        if not self.wants(piece.entry, horizon) or self.no_room(piece.entry):
            return False
        self._put(piece)
        self._untold.pop(piece.entry.name, None)
        return True

    def renew(self, horizon: Horizon) -> None:
        """Write anew what this rank has written before a horizon and given to nobody: it cannot have been deleted."""
        for name in list(self._untold):
            entry = self._pieces[name].entry
            if not entry.deleted and entry.version.step < horizon.step:
                version = PieceVersion(horizon.step, 1, entry.version.writer, entry.version.digest)
                self._put(SharedPiece(msgspec.structs.replace(entry, version=version), self._pieces[name].data))

    def settle(self, names: Container[str], horizon: Horizon) -> list[str]:
        """Go to a newer horizon, and let go of what is older and not among these names: it was deleted, and forgotten.

        Args:
            names: All that ranks at this horizon have.
            horizon: Theirs. One that is not newer than the one here changes nothing.
        Returns:
            The names of the values that are gone.
        """
        if horizon <= self._horizon:
            return []
        self._horizon = horizon
        self._digest = None
        old = [name for name, piece in self._pieces.items() if piece.entry.version.step < horizon.step]
        unknown = [name for name in old if name not in names]
        self.renew(horizon)
        lost = []
        for name in sorted(unknown):
            entry = self._pieces[name].entry
            if entry.version.step < horizon.step:
                self._drop(name)
                if not entry.deleted:
                    lost.append(name)
        return lost

    def _drop(self, name: str) -> None:
        self._nbytes -= self._pieces.pop(name).entry.nbytes
        self._untold.pop(name, None)
        self._digest = self._names = None

    def _put(self, piece: SharedPiece) -> None:
        before = self._pieces.get(piece.entry.name)
        self._nbytes += piece.entry.nbytes - (0 if before is None else before.entry.nbytes)
        self._pieces[piece.entry.name] = piece
        self._digest = None
        if before is None:
            self._names = None


def newest_entries(listings: Iterable[Iterable[PieceEntry]]) -> dict[str, PieceEntry]:
    """Return the newest entry of each piece that any listing names, in the order of names."""
    newest: dict[str, PieceEntry] = {}
    for listing in listings:
        for entry in listing:
            known = newest.get(entry.name)
            if known is None or entry.version > known.version:
                newest[entry.name] = entry
    return {name: newest[name] for name in sorted(newest)}


def deletion(name: str) -> SharedPiece:
    """Return what is written in the place of a piece that is deleted. Its version is none yet, but for the digest."""
    return SharedPiece(PieceEntry(name, PieceVersion(0, 0, "-", _DELETED), "deleted", "uint8", (0,)), _NOTHING)


def deleted_as(entry: PieceEntry) -> SharedPiece:
    """Return the deletion that an entry tells of: there are no bytes to fetch."""
    return SharedPiece(entry, _NOTHING)


def packed(name: str, value: Any) -> SharedPiece:
    """Take a value apart, and copy its bytes. Its version is none yet, but for the digest.

    Args:
        name: Of the piece.
        value: bytes, or an array or tensor.
    Raises:
        LocalError: It is neither, or the name cannot be.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        kind, dtype, data = "bytes", "uint8", np.frombuffer(bytes(value), np.uint8)
        shape: tuple[int, ...] = (data.size,)
    else:
        try:
            read = source(value)
        except LocalError as error:
            raise LocalError(f"piece {name!r}: {error.message}") from error
        kind, dtype, shape = read.kind, read.dtype.name, tuple(read.shape)
        data = read.flat.view(np.uint8).copy()
        data.flags.writeable = False
    try:
        version = PieceVersion(0, 0, "-", _digest(kind, dtype, shape, data))
        entry = msgspec.convert((name, version, kind, dtype, shape), PieceEntry, from_attributes=True)
        name.encode()
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise LocalError(f"{name!r} is no name for a piece of shared state: {error}") from None
    return SharedPiece(entry, data)


def unpacked(piece: SharedPiece) -> Any:
    """Return the value of a piece, in memory of its own.

    Raises:
        LocalError: It is a tensor, and torch is not installed.
    """
    entry = piece.entry
    if entry.kind == "bytes":
        return piece.data.tobytes()
    if entry.kind == "deleted":
        raise AssertionError(f"piece {entry.name!r} was deleted")
    dtype = DType.parse(entry.dtype)
    return wrap(piece.data.copy().view(dtype.storage), dtype, entry.shape, entry.kind)


def _digest(kind: str, dtype: str, shape: Sequence[int], data: Array) -> bytes:
    state = xxhash.xxh3_128(f"{kind} {dtype} {list(shape)} ".encode())
    state.update(data.data)
    return state.digest()


_NOTHING = np.empty(0, np.uint8)
_DELETED = _digest("deleted", "uint8", (0,), _NOTHING)
