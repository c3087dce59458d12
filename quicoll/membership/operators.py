"""What operators ask of a coordinator that runs: messages, and the coordinator's side of them.

An operator is a peer whose certificate has the role "operator"; one with the role "reader" may look, and nothing else.
Neither is a node of the job: it has no rank, it can join no view, and a worker's or the coordinator's certificate does
not let anybody ask this. (A worker's could not: to the transport a second link of the same node is a later process of
it, and would end the first one's.) It dials the coordinator, over the same port, and speaks the messages below on a
link of its own; each of them is answered once.

    Scale      this many ranks, and these nodes are to leave; asked again it changes nothing. OperatorAnswer; of a
               reader it is refused
    Inquire    how far that is. OperatorAnswer
    Look       how the job is, with its links or without. JobStatus, or StandsBy of a coordinator that does not lead

Like all messages of membership they are tagged msgpack maps of fixed shape, with every size bounded, and what breaks a
bound ends the link. What an operator asks is in the journal before it is answered. A Look is answered at once, also
while the journal does not answer, which is when somebody looks: so what it says may be decided and not yet durable, and
one that has lost the lead without knowing says what it knew. Nothing follows from it.

Nothing is kept of an operator: an answer that is lost with its link is asked for again. What it may cost: ASK_RATE
messages a second, ASK_BURST at once, and who asks more often loses its link; all who look within LOOK_AGE_NS get the
same bytes, so that a status is made four times a second at most, with links and without, whoever and however many ask.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias, TypeVar

import msgspec

from quicoll.errors import PeerError
from quicoll.membership.messages import MAX_TEXT, clip
from quicoll.membership.status import JobStatus
from quicoll.membership.view import MAX_MEMBERS, NodeName, ViewId, WorldSize
from quicoll_transport.errors import LinkLost
from quicoll_transport.security.limits import TokenBucket

if TYPE_CHECKING:
    from collections.abc import Callable

    from quicoll.membership.coordinator.scaling import Standing
    from quicoll_transport.endpoint import Link

__all__ = [
    "ASK_BURST",
    "ASK_RATE",
    "LOOK_AGE_NS",
    "OPERATOR",
    "READER",
    "Inquire",
    "Look",
    "OperatorAnswer",
    "OperatorMessage",
    "OperatorReply",
    "Operators",
    "Scale",
    "StandsBy",
    "decode_answer",
    "encode_operation",
]

OPERATOR: Final = "operator"
"""The role in an operator's certificate, and the node's name where no other is given."""
READER: Final = "reader"
"""The role in a certificate with which one may look, and the node's name where no other is given."""
MAX_OPERATION: Final = 256 * 1024
"""Bytes of the largest message: 1024 names of 64 characters, twice; and of a status."""
ASK_RATE: Final = 10
ASK_BURST: Final = 20
LOOK_AGE_NS: Final = 250_000_000
"""How old a status may be when it is given to one more who looks."""

log = logging.getLogger("quicoll.coordinator")

_Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
_Nodes = Annotated[tuple[NodeName, ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Scale(_Message, frozen=True, tag="scale"):
    """I want so many ranks (None: as many as there are), and these nodes to leave."""

    world_size: WorldSize | None = None
    leave: _Nodes = ()


class Inquire(_Message, frozen=True, tag="inquire"):
    """How far is what was asked for last?"""


class OperatorAnswer(_Message, frozen=True, tag="answer"):
    """What is wanted, and what there is.

    refusal: why the request changes nothing, "" where it was taken. world_size: ranks that are wanted; None where
    nobody has asked. leave: nodes that are still to leave for that. view_id, nodes: of the installed view; 0 and none
    without one. waiting_for: what is missing, "" once the view stands as it was asked for.
    """

    refusal: _Text = ""
    world_size: WorldSize | None = None
    leave: _Nodes = ()
    view_id: ViewId = 0
    nodes: _Nodes = ()
    waiting_for: _Text = ""


class Look(_Message, frozen=True, omit_defaults=True, tag="look"):
    """How is the job? links: whether what its members say of their links is wanted, too."""

    links: bool = False


class StandsBy(_Message, frozen=True, tag="stands_by"):
    """Answer to Look of a coordinator that does not lead. leader: as in Standby."""

    leader: _Text = ""


OperatorMessage: TypeAlias = Scale | Inquire | Look
OperatorReply: TypeAlias = OperatorAnswer | JobStatus | StandsBy
_Decoded = TypeVar("_Decoded")

_encoder = msgspec.msgpack.Encoder()
_operation: msgspec.msgpack.Decoder[OperatorMessage] = msgspec.msgpack.Decoder(OperatorMessage)
_answer: msgspec.msgpack.Decoder[OperatorReply] = msgspec.msgpack.Decoder(OperatorReply)


def encode_operation(message: OperatorMessage | OperatorReply) -> bytes:
    """Return the bytes of a message."""
    return _encoder.encode(message)


def decode_operation(data: bytes, *, node: str) -> OperatorMessage:
    """Return what an operator says. Raises PeerError when it is malformed. node: the operator."""
    return _decoded(_operation, data, node)


def decode_answer(data: bytes, *, node: str) -> OperatorReply:
    """Return what a coordinator answers. Raises PeerError when it is malformed. node: the coordinator."""
    return _decoded(_answer, data, node)


def _decoded(decoder: msgspec.msgpack.Decoder[_Decoded], data: bytes, node: str) -> _Decoded:
    if len(data) > MAX_OPERATION:
        raise PeerError(f"an operator's message of {len(data)} bytes is above {MAX_OPERATION}", node=node)
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerError(clip(f"malformed operator's message: {error}"), node=node) from error


class Operators:
    """Answers the operators of one coordinator; keeps nothing of them."""

    def __init__(
        self,
        scale: Callable[[int | None, tuple[str, ...]], str],
        standing: Callable[[], Standing | None],
        when_durable: Callable[[Callable[[], None]], None],
        look: Callable[[bool], bytes],
        now_ns: Callable[[], int],
    ) -> None:
        """Begin.

        Args:
            scale: Takes a request; returns why nothing changes, or "".
            standing: Says how far the last one is; None while another coordinator decides.
            when_durable: Calls what it is given once all that was decided before is in the journal; never where this
                coordinator ends before that, or is found to lead no longer.
            look: Returns the answer to Look, encoded; called with whether links are wanted.
            now_ns: The loop's clock.
        """
        self._when_durable = when_durable
        self._scale = scale
        self._standing = standing
        self._look = look
        self._now_ns = now_ns
        self._looked: dict[bool, tuple[int, bytes]] = {}  # with links or without: when, and what was seen

    def listen(self, link: Link) -> None:
        """Take over a link that an operator, or a reader, has made."""
        link.listen(partial(self._receive, TokenBucket(ASK_RATE, ASK_BURST)), lambda _: None)

    def forget(self) -> None:
        """Forget what was seen last: whether this coordinator leads has changed."""
        self._looked.clear()

    def _receive(self, bucket: TokenBucket, link: Link, data: bytes) -> None:
        if not bucket.take(self._now_ns()):
            link.close(f"more than {ASK_RATE} questions a second")
            return
        try:
            message = decode_operation(data, node=link.node)
        except PeerError as error:
            log.warning("%s", error)
            link.close("malformed message")
            return
        if isinstance(message, Look):
            self._show(link, links=message.links)
            return
        if self._standing() is None:
            link.close("another coordinator leads the job")
            return
        refusal = ""
        if isinstance(message, Scale) and link.identity.role != OPERATOR:
            refusal = f"{link.identity} may look, and ask for nothing: this needs an operator's certificate"
        elif isinstance(message, Scale):
            refusal = self._scale(message.world_size, message.leave)
            log.info("operator %s asks for %s: %s", link.node, _words(message), refusal or "taken")
        found = self._standing()
        if found is None:
            return
        answer = OperatorAnswer(
            refusal=clip(refusal),
            world_size=found.world_size,
            leave=found.leave,
            view_id=found.view_id,
            nodes=found.nodes,
            waiting_for=found.waiting_for,
        )
        self._when_durable(lambda: _tell(link, encode_operation(answer)))

    def _show(self, link: Link, *, links: bool) -> None:
        now_ns = self._now_ns()
        looked_ns, seen = self._looked.get(links, (None, b""))
        if looked_ns is None or now_ns - looked_ns >= LOOK_AGE_NS:
            seen = self._look(links)
            self._looked[links] = now_ns, seen
        _tell(link, seen)


def _tell(link: Link, answer: bytes) -> None:
    with contextlib.suppress(LinkLost):  # it asks again
        link.send_app(answer)


def _words(message: Scale) -> str:
    ranks = "as many ranks" if message.world_size is None else f"{message.world_size} ranks"
    return f"{ranks} without {', '.join(message.leave)}" if message.leave else ranks
