"""What two ranks say to each other to make a store as new as the other's: questions, answers, one round of them.

    asker                             the other one
    ComparePieces(digest)      --->   of all versions of a shared state
                               <---   SamePieces: over. Or the first PiecePage, with the horizon
    FetchPiece(version, range) --->   for each piece of the page that is newer there than here, range by range
                               <---   PieceChunk: the bytes; or None: it has another version by now, or does not know it
    ListPieces(after)          --->   where the page said that there are more
                               <---   PiecePage ... until there are no more
                                      then the asker settles, where the horizon is newer than its own

A question takes nothing from the other rank, and changes no piece there, so any of them may be lost, come late or come
twice; a round that breaks off anywhere leaves what it had merged until then, and the next one asks for the rest. Each
rank asks each other one over and over, so it comes to have whatever is newer there.

    COMPARING --page--> FETCHING --all pieces of the page are here--> LISTING --page--> FETCHING ...
    any       --same, no more pages, or `error`--> OVER

Deletions are in the pages, without bytes to fetch. Whether a name that is unknown here is taken from a peer hangs on
its horizon, and so does what is let go here (quicoll.tiers.pieces): so a round is of one horizon, and ends where the
peer goes to another one meanwhile. A horizon beyond the last step that this rank knows to be committed is not believed,
and the round ends: nothing is taken from that peer before this rank knows of that step.

Bounds. A page has PAGE entries, all pages of a round MAX_PIECES; a chunk has MAX_CHUNK bytes. An asker has memory for
one piece beside its store, of a size that fits into it. Whoever answers keeps nothing of a question.

A piece comes from one rank from its first byte to its last, so bytes with another digest than the piece's are that
rank's: the round ends by `error`, nothing is merged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
import numpy as np

from quicoll.checks import MAX_NAME
from quicoll.errors import PeerError
from quicoll.tiers.pieces import (
    MAX_COUNT,
    MAX_PIECES,
    Horizon,
    PieceEntry,
    PieceStore,
    PieceVersion,
    SharedPiece,
    deleted_as,
)

if TYPE_CHECKING:
    from quicoll.numerics.dtypes import Array

__all__ = [
    "MAX_CHUNK",
    "MAX_PIECE_MESSAGE",
    "PAGE",
    "ComparePieces",
    "FetchPiece",
    "ListPieces",
    "PieceAnswer",
    "PieceArrival",
    "PieceChunk",
    "PieceMessage",
    "PiecePage",
    "PieceQuestion",
    "PieceRound",
    "SamePieces",
    "answer_question",
    "decode_pieces",
    "encode_pieces",
]

PAGE = 64
"""Entries of one page."""
MAX_CHUNK = 1 << 20
"""Bytes of a piece in one message."""
MAX_PIECE_MESSAGE = MAX_CHUNK + (1 << 16)
"""Bytes of a message."""

_State = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]


class ComparePieces(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=1):
    """Do you have just these versions? digest: of the asker's store."""

    state: _State
    digest: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class SamePieces(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=2):
    """I have; or I share no such state."""


class ListPieces(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=3):
    """Which pieces do you have whose names come after this one?"""

    state: _State
    after: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class PiecePage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=4):
    """These, in the order of names. more: there are others after them. horizon: of who has them."""

    entries: Annotated[tuple[PieceEntry, ...], msgspec.Meta(max_length=PAGE)]
    more: bool
    horizon: Horizon = Horizon()


class FetchPiece(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=5):
    """Give me bytes [start, start + size) of this version of a piece."""

    state: _State
    name: _State
    version: PieceVersion
    start: _Count
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_CHUNK)]


class PieceChunk(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=6):
    """Here they are. None: I do not have this version."""

    data: Annotated[bytes, msgspec.Meta(max_length=MAX_CHUNK)] | None


PieceQuestion: TypeAlias = ComparePieces | ListPieces | FetchPiece
"""What a rank asks another one."""
PieceAnswer: TypeAlias = SamePieces | PiecePage | PieceChunk
"""What it is told."""


class PieceMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A question, or the answer to the question of this number."""

    number: _Count
    body: PieceQuestion | PieceAnswer


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PieceMessage)


def encode_pieces(message: PieceMessage) -> bytes:
    """Return the bytes of a message."""
    return _encoder.encode(message)


def decode_pieces(data: bytes | memoryview, *, node: str) -> PieceMessage:
    """Read a peer's message.

    Args:
        data: Its bytes.
        node: The peer, for the error.
    Raises:
        PeerError: No rank of ours would send this.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"malformed message about shared state: {error}", node=node) from error


def answer_question(find: Callable[[str], PieceStore | None], question: PieceQuestion) -> PieceAnswer:
    """Answer a question of a peer.

    Args:
        find: Gives the store of a shared state, None for one that is not shared here.
        question: What is asked.
    """
    store = find(question.state)
    if isinstance(question, FetchPiece):
        piece = None if store is None else store.find(question.name, question.version)
        if piece is None:
            return PieceChunk(None)
        if store is not None:
            store.told(question.name, question.version)
        return PieceChunk(piece.data[question.start : question.start + question.size].tobytes())
    if store is None or (isinstance(question, ComparePieces) and question.digest == store.digest):
        return SamePieces()
    after = question.after if isinstance(question, ListPieces) else ""
    entries = [entry for entry in store.entries() if entry.name > after]
    return PiecePage(tuple(entries[:PAGE]), len(entries) > PAGE, store.horizon)


class PieceArrival:
    """A piece that comes from one peer, range by range. entry: which."""

    def __init__(self, state: str, entry: PieceEntry, chunk: int) -> None:
        """Take memory for a piece.

        Args:
            state: The name of the shared state.
            entry: The piece; its size has been bounded.
            chunk: Bytes that are asked for at a time, MAX_CHUNK at most.
        """
        self.entry = entry
        self._state = state
        self._chunk = chunk
        self._data: Array = np.empty(entry.nbytes, np.uint8)
        self._there = 0

    @property
    def question(self) -> FetchPiece | None:
        """What is to be asked next; None when all bytes are here."""
        size = min(self._chunk, self._data.size - self._there)
        return FetchPiece(self._state, self.entry.name, self.entry.version, self._there, size) if size else None

    def take(self, data: bytes) -> str:
        """Take the bytes that were asked for last. Return what is wrong with them, "" if nothing is."""
        question = self.question
        if question is None or len(data) != question.size:
            return f"gave {len(data)} bytes of piece {self.entry.name!r}, and not those that it was asked for"
        self._data[self._there : self._there + len(data)] = np.frombuffer(data, np.uint8)
        self._there += len(data)
        return ""

    def whole(self) -> SharedPiece | None:
        """Return the piece, all of whose bytes are here; None where they are not those of its version."""
        self._data.flags.writeable = False
        piece = SharedPiece(self.entry, self._data)
        return piece if piece.right else None


class PieceRound:
    """One round of questions to one peer; see the module's head.

    question: what is to be asked next; None when the round is over. error: what the peer did wrong, "" if nothing.
    refused: why a piece of the peer was not taken, "" if all were. merged: how many pieces came. lost: the names of
    values that were let go here, since the peer has forgotten deletions that this rank has not heard of.
    """

    def __init__(self, state: str, store: PieceStore, chunk: int, *, step: int = 0) -> None:
        """Begin by comparing.

        Args:
            state: The name of the shared state.
            store: What is here; pieces are merged into it.
            chunk: Bytes that are asked for at a time, MAX_CHUNK at most.
            step: The last that this rank knows to be committed.
        """
        self.error = ""
        self.refused = ""
        self.merged = 0
        self.lost: list[str] = []
        self._step = step
        self._horizon: Horizon | None = None  # of the peer, from its first page on
        self._names: dict[str, None] = {}  # that it has listed
        self._state = state
        self._store = store
        self._chunk = chunk
        self._wanted: deque[PieceEntry] = deque()
        self._arrival: PieceArrival | None = None
        self._last = ""  # name of the last page
        self._more = False
        self.question: PieceQuestion | None = ComparePieces(state, store.digest)

    def take(self, told: PieceAnswer) -> None:
        """Take the answer to `question`, which is the next one then."""
        match self.question, told:
            case ComparePieces(), SamePieces():
                self.question = None
            case ((ComparePieces() | ListPieces()), PiecePage()):
                self._page(told)
            case FetchPiece(), PieceChunk():
                self._fetched(told)
            case None, _:
                raise AssertionError("the round is over")
            case _:
                self._fail(f"answered a {type(self.question).__name__} with a {type(told).__name__}")

    def _page(self, page: PiecePage) -> None:
        names = [entry.name for entry in page.entries]
        if any(one >= other for one, other in zip((self._last, *names), names, strict=False)):
            self._fail("listed its pieces in another order than that of their names")
            return
        if page.more and not names:
            self._fail("says that it has more pieces and names none")
            return
        if self._horizon not in (None, page.horizon) or page.horizon.step > self._step:
            self.question = None  # nothing that it has listed before, or nothing at all, can be taken as of one horizon
            return
        self._horizon = page.horizon
        self._names |= dict.fromkeys(names)
        if len(self._names) > MAX_PIECES:
            self._fail(f"lists more than {MAX_PIECES} pieces")
            return
        self._last, self._more = (names[-1] if names else ""), page.more
        for entry in page.entries:
            if not self._store.wants(entry, self._horizon):
                continue
            refused = self._store.no_room(entry)
            self.refused = self.refused or refused
            if entry.deleted:
                self.merged += self._store.merge(deleted_as(entry), self._horizon)
            elif not refused:
                self._wanted.append(entry)
        self._next()

    def _fetched(self, chunk: PieceChunk) -> None:
        arrival = self._arrival
        if arrival is None:
            raise AssertionError("nothing was fetched")
        if chunk.data is not None:
            wrong = arrival.take(chunk.data)
            if wrong:
                self._fail(wrong)
                return
            if arrival.question is not None:
                self.question = arrival.question
                return
            if not self._merged(arrival):
                return
        self._next()

    def _merged(self, arrival: PieceArrival) -> bool:
        """Merge a piece whose bytes are all here. Return whether they are right; the round is over if not."""
        whole, self._arrival = arrival.whole(), None
        if whole is None:
            self._fail(f"gave piece {arrival.entry.name!r} with other bits than its digest says")
            return False
        self.merged += self._store.merge(whole, self._horizon)
        return True

    def _next(self) -> None:
        """Go on with the next piece of the page, then with the next page."""
        while self._wanted:
            entry = self._wanted.popleft()
            if not self._store.wants(entry, self._horizon) or self._store.no_room(entry):
                continue
            arrival = PieceArrival(self._state, entry, self._chunk)
            self._arrival, self.question = arrival, arrival.question
            if self.question is not None or not self._merged(arrival):  # of no bytes: there is nothing to ask for
                return
        self.question = ListPieces(self._state, self._last) if self._more else None
        if self.question is None and self._horizon is not None:
            self.lost = self._store.settle(self._names, self._horizon)

    def _fail(self, error: str) -> None:
        self.error, self.question, self._arrival = error, None, None
        self._wanted.clear()
