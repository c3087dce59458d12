"""Where a rank is that others wait for: asked of it shortly before it is given up, and shown in the error's notes.

That a rank did not call an operation says little; where its threads are says most of it. Its engine has a thread of its
own, which answers while the others compute, wait for a disk, or stand in another operation.

    unasked --an operation is about to be late--> asked --answer--> answered
                                                  asked --none by the time of the error--> silent

Asked is who has not called an operation `ahead` of its deadline, once in AGAIN_S. Nothing waits for the answer: what is
there when the operation fails is in its error, and that there is nothing is said too: a process that stands still
(SIGSTOP, no memory, no processor) does not answer, and one whose engine answers is no such process.

Only who is in the view is asked, and only those who are in it get an answer: the text that a rank makes of its stacks
(quicoll.observability.thread_stacks) has names of functions and files, no values and no lines of source. It is made
once a second at most, whoever asks, and each peer gets one a second. What comes is shown without control characters.
`late_stacks` off: none is given and none asked for; who asks hears so.

Invariants: an answer that was not asked for, or comes after the error, is dropped; texts are kept for the ranks of one
view, of MAX_TOLD characters each; no operation ends later because of any of this.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from quicoll.engine.messages import MAX_TOLD, AskStack, StackTold, encode_message
from quicoll.observability.flight_record import printable
from quicoll_transport.errors import TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from quicoll.errors import QuicollError
    from quicoll.membership.view import View
    from quicoll_transport.endpoint import Link

__all__ = ["LateStacks", "ahead"]

AHEAD_S = 2.0
AGAIN_S = 10.0
_EVERY_S = 1.0
_SHOWN = 4


def ahead(timeout: float) -> float:
    """Return how many seconds before its deadline an operation's late ranks are asked. timeout: its own."""
    return min(timeout / 4, AHEAD_S)


@dataclass(slots=True)
class _Asked:
    view: int
    at: float
    answered: float | None = None
    text: str = ""
    silent: bool = False


class LateStacks:
    """See the module's head. On the engine's loop."""

    def __init__(
        self,
        *,
        shows: bool,
        stacks: Callable[[int, Callable[[str], None]], None],
        now: Callable[[], float],
        link_to: Callable[[str], Link | None],
        on_told: Callable[[str, str], None] = lambda node, text: None,
    ) -> None:
        """Begin with nobody asked.

        Args:
            shows: Whether this rank tells where its threads are, and asks others.
            stacks: Gives the stacks of the program's process, of so many characters at most, now or in a while.
            now: Seconds of the engine's loop.
            link_to: Gives the link to a node.
            on_told: Called with a node and what became of asking it.
        """
        self._shows = shows
        self._stacks = stacks
        self._now = now
        self._link_to = link_to
        self._on_told = on_told
        self._asked: dict[str, _Asked] = {}
        self._answered: dict[str, float] = {}  # by node, when it got an answer
        self._made: tuple[float, str] | None = None

    def ask(self, view: View, ranks: Sequence[int]) -> None:
        """Ask ranks of a view where they are.

        Args:
            view: The view.
            ranks: Those whose call has not come.
        """
        if not self._shows:
            return
        now = self._now()
        self._asked = {node: each for node, each in self._asked.items() if each.view == view.view_id}
        for rank in ranks:
            node = view.members[rank].node
            before = self._asked.get(node)
            link = self._link_to(node)
            if link is None or (before is not None and now - before.at < AGAIN_S):
                continue
            self._asked[node] = _Asked(view.view_id, now)
            try:
                link.send_app(encode_message(AskStack(view.view_id)))
            except TransportError:  # its end is an error of its own
                del self._asked[node]

    def receive(self, link: Link, message: AskStack | StackTold, view: View | None) -> None:
        """Take a peer's question, or its answer.

        Args:
            link: It came on.
            message: It.
            view: The one that it speaks of, where that is installed here.
        """
        if view is None or view.rank_of(link.node) is None:
            return
        if isinstance(message, AskStack):
            self._answer(link, view.view_id)
            return
        asked = self._asked.get(link.node)
        if asked is None or asked.view != view.view_id or asked.silent or asked.answered is not None:
            return
        asked.answered = self._now()
        asked.text = "\n".join(printable(line, MAX_TOLD) for line in message.text.split("\n"))
        self._on_told(link.node, asked.text or _kept(link.node))

    def _answer(self, link: Link, view_id: int) -> None:
        now = self._now()
        if now - self._answered.get(link.node, -_EVERY_S) < _EVERY_S:
            return
        if len(self._answered) > 4096:  # of views that are over
            self._answered.clear()
        self._answered[link.node] = now
        if not self._shows:
            self._tell(link, view_id, "")
        elif self._made is not None and now - self._made[0] < _EVERY_S:
            self._tell(link, view_id, self._made[1])
        else:
            self._stacks(MAX_TOLD, partial(self._made_now, link, view_id))

    def _made_now(self, link: Link, view_id: int, text: str) -> None:
        self._made = self._now(), text
        self._tell(link, view_id, text)

    def _tell(self, link: Link, view_id: int, text: str) -> None:
        with contextlib.suppress(TransportError):  # its end is an error of its own
            link.send_app(encode_message(StackTold(view_id, text)))

    def explain(self, error: QuicollError) -> None:
        """Add to an error where the ranks were that it waited for, as far as they were asked in its view.

        Args:
            error: Of an operation.
        """
        now = self._now()
        found = [(node, each) for node, each in self._asked.items() if each.view == error.view]
        for node, each in [item for item in found if error.node in ("", item[0])][:_SHOWN]:
            if each.answered is None:
                waited = now - each.at
                text = (
                    f"{node} was asked where it is, and did not answer within {waited:.1f} s: its process stands "
                    "still, or nothing gets through to it"
                )
                if not each.silent:
                    each.silent = True
                    self._on_told(node, text)
            elif not each.text:
                text = _kept(node)
            else:
                text = f"where {node} was {now - each.answered:.1f} s before this error:\n{each.text}"
            error.add_note(text)


def _kept(node: str) -> str:
    return f"{node} does not tell where it is: its setting late_stacks is off"
