"""What a rank's program and the process of its engine tell each other, each word in order and once.

The two are of one program and trust each other; what is secret in these words (`Shown`) goes over their line alone.
What large operations read and write is in memory that both have mapped, and only its place is named here: the first
byte counted from 1, and how many (quicoll.local.arena).

Whatever is answered has a number that nothing before it had: calls (`BeginCall`), votes, and `EngineAsk`, whose `what`
is one of `ASKED`, with arguments and answer of these types. `EngineTell` has no answer (`TOLD`).
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, TypeAlias

import msgspec

from quicoll.engine.decisions import Decision
from quicoll.errors import Corrupted, LocalError, Mismatch, Partitioned, PeerError, QuicollError
from quicoll.lanes.orders import Shown
from quicoll.membership.member.actions import Dismissal, FreeToLeave, JobOver  # noqa: TC001 - for msgspec, as below
from quicoll.membership.view import View  # noqa: TC001 - likewise
from quicoll.observability.stragglers import Straggler  # noqa: TC001 - likewise
from quicoll_transport.endpoint import LinkState
from quicoll_transport.events import LinkSnapshot

__all__ = [
    "ASKED",
    "TOLD",
    "AskStacks",
    "AwaitCall",
    "AwaitDecision",
    "BeginCall",
    "CallEnded",
    "CastVote",
    "EngineAlive",
    "EngineAnswer",
    "EngineAsk",
    "EngineOpened",
    "EngineStands",
    "EngineStop",
    "EngineTell",
    "EngineWord",
    "ErrorWord",
    "EventTold",
    "FromLink",
    "GiveWork",
    "LinkStands",
    "LogTold",
    "MakeWork",
    "OpenEngine",
    "ProgramWord",
    "ReceiveOn",
    "ReceivedOn",
    "SignOfLife",
    "ToLink",
    "TransmitOn",
    "TransmittedOn",
    "ViewFound",
    "WorkWord",
    "body_of",
    "decision_of",
    "decision_row",
    "decode_engine_word",
    "decode_program_word",
    "encode_word",
    "error_of",
    "error_word",
    "read_body",
    "snapshot_of",
    "snapshot_row",
]

_KINDS: dict[str, type[QuicollError]] = {
    each.__name__: each for each in (LocalError, Mismatch, PeerError, Corrupted, Partitioned)
}


class ErrorWord(msgspec.Struct, array_like=True):
    """An error of ours; one of another kind has its class in the message. cause: what it follows from."""

    kind: str
    message: str
    rank: int | None
    node: str
    view: int | None
    step: int | None
    op: str
    lost: tuple[str, ...]
    usable: bool
    odd: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()
    cause: ErrorWord | None = None


def error_word(error: BaseException) -> ErrorWord:
    """Return an error as it is told."""
    notes = tuple(getattr(error, "__notes__", ()))
    cause = error.__cause__
    told = error_word(cause) if isinstance(cause, QuicollError) else None
    if not isinstance(error, QuicollError):
        kind = "cancelled" if isinstance(error, CancelledError) else ""
        return ErrorWord(kind, f"{type(error).__name__}: {error}", None, "", None, None, "", (), False, None, notes)
    return ErrorWord(
        type(error).__name__,
        error.message,
        error.rank,
        error.node,
        error.view,
        error.step,
        error.op,
        error.lost,
        error.usable,
        error.odd if isinstance(error, Corrupted) else None,
        notes,
        told,
    )


def error_of(word: ErrorWord) -> BaseException:
    """Return the error that was told; CancelledError where that is it."""
    if word.kind == "cancelled":
        return CancelledError()
    kind = _KINDS.get(word.kind, LocalError)
    more: dict[str, Any] = {"odd": word.odd} if kind is Corrupted else {}
    error = kind(
        word.message,
        rank=word.rank,
        node=word.node,
        view=word.view,
        step=word.step,
        op=word.op,
        lost=word.lost,
        usable=word.usable,
        **more,
    )
    for note in word.notes:
        error.add_note(note)
    if word.cause is not None:
        error.__cause__ = error_of(word.cause)
    return error


class ViewFound(msgspec.Struct, array_like=True):
    """What a wait for a view has found: one of them."""

    view: View | None = None
    over: JobOver | None = None
    dismissal: Dismissal | None = None
    free: FreeToLeave | None = None


ASKED: dict[str, tuple[Any, Any]] = {
    "wait_view": (tuple[float | None, bool, int], ViewFound),
    "what_is_missing": (tuple[()], str),
    "give_up": (tuple[int, str], None),
    "break_view": (tuple[int, ErrorWord], None),
    "ask_to_leave": (tuple[()], bool),
    "step_out": (tuple[int], None),
    "parted": (tuple[()], None),
    "unanswered": (tuple[int, str], tuple[int, int] | None),
    "links": (tuple[()], tuple[tuple[Any, ...], ...]),  # rows of `snapshot_row`
    "rotate": (tuple[Shown, tuple[str, ...]], str),
    "deny": (tuple[str], None),
    "aclose": (tuple[str, float, int | None], None),
}
TOLD: dict[str, Any] = {
    "begin_step": tuple[int, int],
    "divide": tuple[int],
    "step_in": tuple[()],
    "owns_state": tuple[()],
    "state_received": tuple[int, int, int, tuple[str, ...]],
    "state_torn": tuple[int, str],
    "emit": tuple[str, bytes],
    "stacks": tuple[int, str],
    "flight_left": tuple[str],
    "flight_asked": tuple[str],
    "flight_stack": tuple[str, str],
}

ArenaPlace: TypeAlias = tuple[int, int]
"""The first byte, counted from 1, and how many."""


class WorkWord(msgspec.Struct, array_like=True):
    """`quicoll.engine.calls.Work`. plan, told: as quicoll.engine_process.plans has it. inputs: the places of each slot,
    in whose order its elements are."""

    plan: int
    told: bytes
    dtype: str
    acc: str
    op: str
    inputs: tuple[tuple[ArenaPlace, ...], ...]
    output: ArenaPlace


# -- from the program ------------------------------------------------------------------------------------------------


class OpenEngine(msgspec.Struct, array_like=True, tag=1):
    """The first word of all. parent: the program's process. settings: of the rank, as JSON. shown: its credentials.
    incarnation: 0: it draws one. nice: how far the process steps back behind others. log_level: from which on it tells
    what it logs."""

    parent: int
    settings: bytes
    shown: Shown
    incarnation: int
    nice: int
    log_level: int


class EngineAsk(msgspec.Struct, array_like=True, tag=2):
    number: int
    what: str
    arguments: bytes


class EngineTell(msgspec.Struct, array_like=True, tag=3):
    what: str
    arguments: bytes


class EngineStop(msgspec.Struct, array_like=True, tag=4):
    """Nobody waits for this any more; it is answered all the same."""

    number: int


class BeginCall(msgspec.Struct, array_like=True, tag=5):
    """`Engine.collective`. sizes, given: as in `quicoll.engine.calls.Call`. taken: its number in the group, where that
    was taken before. work: where it depends on nothing that only the engine knows."""

    number: int
    view: int
    group: int
    timeout: float
    step: int | None
    taken: int | None
    name: str
    signature: str
    counts: tuple[int, ...]
    gathers: bool
    measures: bool
    ranks: tuple[int, ...] | None
    where: str
    watched: bool
    divides: bool
    sizes: tuple[int, ...] | None
    given: bytes
    work: WorkWord | None


class GiveWork(msgspec.Struct, array_like=True, tag=6):
    """What `MakeWork` asked for, or why there is none."""

    number: int
    work: WorkWord | None
    error: ErrorWord | None


class CastVote(msgspec.Struct, array_like=True, tag=7):
    number: int
    view: int
    digest: bytes
    groups: tuple[tuple[int, bytes], ...]
    timeout: float
    unfinished: tuple[str, ...]


class AwaitDecision(msgspec.Struct, array_like=True, tag=8):
    number: int
    view: int
    index: int
    timeout: float


class AwaitCall(msgspec.Struct, array_like=True, tag=9):
    """`Engine.next_call`."""

    number: int
    view: int
    groups: dict[int, int]
    timeout: float
    step: int | None


class ToLink(msgspec.Struct, array_like=True, tag=10):
    """To the link of a number. what: "app" sends `data`, "discard" forgets messages whose tags begin so, "close" ends
    it for the reason that `data` is."""

    link: int
    what: str
    data: bytes


class TransmitOn(msgspec.Struct, array_like=True, tag=11):
    """Send `data` on a link, to the memory of this tag; or on the channel of a number, where there is no tag."""

    number: int
    link: int
    tag: bytes
    channel: int
    data: bytes


class ReceiveOn(msgspec.Struct, array_like=True, tag=12):
    """Receive the message of this tag, of `nbytes`; or, where there is no tag, the next one of a channel, of so many at
    most."""

    number: int
    link: int
    tag: bytes
    channel: int
    nbytes: int


class SignOfLife(msgspec.Struct, array_like=True, tag=13):
    """Asks for a sign of life, and is one."""


# -- from the engine -------------------------------------------------------------------------------------------------


class EngineAnswer(msgspec.Struct, array_like=True, tag=1):
    """To `EngineAsk`, `CastVote`, `AwaitDecision` (a Decision) and `AwaitCall` (a number): what was found, or why
    nothing was."""

    number: int
    value: bytes
    error: ErrorWord | None


class MakeWork(msgspec.Struct, array_like=True, tag=2):
    """Work is wanted. counts: as `Known` has them. network: its number, 0: none; told: it, where that is new."""

    number: int
    counts: tuple[tuple[int, ...] | None, ...]
    network: int
    told: bytes


class CallEnded(msgspec.Struct, array_like=True, tag=3):
    """A call is over, and its memory the program's again. seq: its number in the group. given: what each rank gave,
    where it was announced."""

    number: int
    seq: int | None
    error: ErrorWord | None
    given: tuple[bytes, ...] | None


class EventTold(msgspec.Struct, array_like=True, tag=4):
    """An event. fields: as JSON."""

    t_ns: int
    kind: str
    fields: bytes


class LogTold(msgspec.Struct, array_like=True, tag=5):
    name: str
    level: int
    text: str


class EngineStands(msgspec.Struct, array_like=True, tag=6):
    """What the program may look at without asking, when it has changed. view_at_work: its id, 0 while there is none.
    lost_after, hold_timeout, sources: settings that were taken from the coordinator."""

    view_at_work: int
    lost_after: float
    hold_timeout: float
    sources: dict[str, str]
    stragglers: tuple[Straggler, ...]


class LinkStands(msgspec.Struct, array_like=True, tag=7):
    """How a link to another worker is: its node, the incarnation of the process there, whether it is up, whether it has
    ended, and why."""

    link: int
    node: str
    incarnation: int
    up: bool
    ended: bool
    cause: str


class FromLink(msgspec.Struct, array_like=True, tag=8):
    """A peer's message about lessons."""

    link: int
    data: bytes


class TransmittedOn(msgspec.Struct, array_like=True, tag=9):
    """A `TransmitOn` is over. error: "" where it has arrived."""

    number: int
    error: str


class ReceivedOn(msgspec.Struct, array_like=True, tag=10):
    """A `ReceiveOn` is over."""

    number: int
    data: bytes
    error: str


class AskStacks(msgspec.Struct, array_like=True, tag=11):
    """Where the threads of the program are, in so many characters at most; `EngineTell` "stacks" has the answer."""

    number: int
    most: int


class EngineOpened(msgspec.Struct, array_like=True, tag=12):
    """The engine is there, or why it is not."""

    error: ErrorWord | None
    flight: bool


class EngineAlive(msgspec.Struct, array_like=True, tag=13):
    """Answers a `SignOfLife`."""


ProgramWord: TypeAlias = (
    OpenEngine
    | EngineAsk
    | EngineTell
    | EngineStop
    | BeginCall
    | GiveWork
    | CastVote
    | AwaitDecision
    | AwaitCall
    | ToLink
    | TransmitOn
    | ReceiveOn
    | SignOfLife
)
EngineWord: TypeAlias = (
    EngineAnswer
    | MakeWork
    | CallEnded
    | EventTold
    | LogTold
    | EngineStands
    | LinkStands
    | FromLink
    | TransmittedOn
    | ReceivedOn
    | AskStacks
    | EngineOpened
    | EngineAlive
)

_encoder = msgspec.msgpack.Encoder()
_program: msgspec.msgpack.Decoder[ProgramWord] = msgspec.msgpack.Decoder(ProgramWord)
_engine: msgspec.msgpack.Decoder[EngineWord] = msgspec.msgpack.Decoder(EngineWord)
_decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
    **{f"? {name}": msgspec.msgpack.Decoder(arguments) for name, (arguments, _) in ASKED.items()},
    **{f"= {name}": msgspec.msgpack.Decoder(answer) for name, (_, answer) in ASKED.items()},
    **{f"! {name}": msgspec.msgpack.Decoder(arguments) for name, arguments in TOLD.items()},
    "= decision": msgspec.msgpack.Decoder(tuple[Any, ...]),  # fields of a Decision
    "= number": msgspec.msgpack.Decoder(int),
}


def encode_word(word: ProgramWord | EngineWord) -> bytes:
    """Return the bytes of a word."""
    return _encoder.encode(word)


def decode_program_word(data: bytes) -> ProgramWord:
    """Return a word of the program."""
    return _program.decode(data)


def decode_engine_word(data: bytes) -> EngineWord:
    """Return a word of the engine."""
    return _engine.decode(data)


def snapshot_row(link: LinkSnapshot) -> tuple[Any, ...]:
    """Return a link's figures as they are told."""
    return tuple([getattr(link, each.name) for each in fields(LinkSnapshot)])


def snapshot_of(row: Sequence[Any]) -> LinkSnapshot:
    """Return the figures that a row tells."""
    given = dict(zip([each.name for each in fields(LinkSnapshot)], row, strict=True))
    return LinkSnapshot(**{**given, "state": LinkState(given["state"])})


def decision_row(decision: Decision) -> tuple[Any, ...]:
    """Return a decision as it is told."""
    return tuple([getattr(decision, each.name) for each in fields(Decision)])


def decision_of(row: Sequence[Any]) -> Decision:
    """Return the decision that a row tells."""
    index, commit, cause, lost, culprit, kind = row
    return Decision(index, commit, cause, tuple(lost), culprit, kind)


def body_of(value: object) -> bytes:
    """Return arguments or an answer as a word has them."""
    return _encoder.encode(value)


def read_body(kind: str, data: bytes) -> Any:
    """Return what was body_of. kind: "? NAME" for what is asked, "= NAME" for an answer, "! NAME" for what is told."""
    return _decoders[kind].decode(data)
