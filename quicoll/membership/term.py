"""One leadership of a coordinator: its core, its journal, and everything that the two have set in motion.

    at work    messages, losses, requests and time go to the core; its actions are carried out in order. A Persist is in
               the journal before the next action, and what is right only as long as nobody else has appended to the
               journal (`rests_on_journal`) is carried out when the journal has said so
    failed     the journal could not be written or asked: nothing more is carried out, and `wait_failed` says why
    over       by `end`, at once and for good

Invariants:

1. All that a leadership has begun belongs to its term, and nothing of it to anybody else: the core, its timer, the
   journal's call that is under way, what is to be done after that, answers that wait for the journal. When the term is
   over none of it has an effect any more: no message is taken in, no action carried out, no timer armed. What a call
   of the journal brings then is heard by nobody.
2. A term knows what its journal held when it began, and what it has appended itself. Nothing is handed from one term to
   the next, of the same process neither: each is made from the journal, as it was read under its own token.
3. The journal that a term is given has the token of this leadership, and never gets another. So whatever is still under
   way when the term is over has the old token, however late it arrives, and whoever leads by then.

Failure cases:

an append is under way at the end   it goes in, or not; nobody is told of it here. Once anybody has taken the lease,
                                    this process for its next term or another one, the database refuses it. What went
                                    in before that is read by whoever has taken the lease
its answer is lost                  the same: the term fails, and who reads the journal next finds the record, or not
calls wait behind that one          the journal refuses them, as it has failed, or the database, as their token is old
a timer fires in the same turn      it was cancelled; one that runs all the same finds the term over
a message comes after the end       the service has no term: it answers as one that stands by
an operator waits for an answer     it is never given; the link ends, and the operator asks who leads

Where the journal is called on a thread of its own, messages and time go on coming in meanwhile; what follows from them
waits its turn. To members that is a coordinator far away.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TYPE_CHECKING

from quicoll.errors import QuicollError
from quicoll.membership.coordinator.actions import CoordinatorAction, Note, Persist, ViewInstalled, rests_on_journal
from quicoll.membership.coordinator.core import CoordinatorCore
from quicoll.membership.journal import LeaseLost

if TYPE_CHECKING:
    from quicoll.membership.coordinator.config import CoordinatorConfig
    from quicoll.membership.journal import RecordStore
    from quicoll.membership.messages import MemberMessage

__all__ = ["Term"]

log = logging.getLogger("quicoll.coordinator")


class Term:
    """See the module's head. `work` begins it, and has to be called after what was told to `core` directly.

    Args:
        config: The core's settings.
        journal: What was decided, and where decisions go. It stays its maker's to close.
        loop: The running loop.
        executor: Where the journal is called; one thread. None calls it on the loop.
        carry_out: Does what an action says outside of the journal.
    Raises:
        LocalError: Settings and journal contradict each other.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        journal: RecordStore,
        *,
        loop: asyncio.AbstractEventLoop,
        executor: Executor | None,
        carry_out: Callable[[CoordinatorAction], None],
    ) -> None:
        self._journal = journal
        self._loop = loop
        self._executor = executor
        self._carry_out = carry_out
        self._writing: asyncio.Future[None] | None = None  # the journal's call under way
        self._writing_ns = 0  # since when
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._answers: list[Callable[[], None]] = []  # until what they say is in the journal
        self._led_view = False  # since `at_work` was asked last
        self._failed: asyncio.Future[None] = loop.create_future()
        self._over = False
        self.core = CoordinatorCore(config, journal.load(), now_ns=self.now_ns())

    def __repr__(self) -> str:
        state = "over" if self._over else "failed" if self.failed else "at work"
        return f"<Term {state} {self.core!r}>"

    def now_ns(self) -> int:
        """Return the time by which the core goes."""
        return round(self._loop.time() * 1e9)

    @property
    def failed(self) -> bool:
        """Whether it cannot go on; `wait_failed` says why."""
        return self._failed.done()

    @property
    def journal_ns(self) -> int:
        """For how long the journal has not answered what it was asked; 0 where nothing is asked of it."""
        return 0 if self._writing is None else max(0, self.now_ns() - self._writing_ns)

    async def wait_failed(self) -> None:
        """Wait for ever, or until the term cannot go on.

        Raises:
            QuicollError: Why it cannot; mostly JournalError.
        """
        await asyncio.shield(self._failed)

    def at_work(self) -> bool:
        """Return whether there is a view, or was one since this was asked last."""
        led, self._led_view = self._led_view or self.core.view is not None, False
        return led

    # What comes in

    def receive(self, node: str, message: MemberMessage, *, incarnation: int | None) -> None:
        """Take in a message. Arguments as `CoordinatorCore.receive` has them."""
        if not self._over:
            self.core.receive(node, message, now_ns=self.now_ns(), incarnation=incarnation)
            self.work()

    def member_lost(self, node: str, cause: str, *, incarnation: int | None) -> None:
        """Take in that a link is gone. Arguments as `CoordinatorCore.member_lost` has them."""
        if not self._over:
            self.core.member_lost(node, cause, now_ns=self.now_ns(), incarnation=incarnation)
            self.work()

    def saw(self, node: str, address: tuple[str, int]) -> None:
        """Take in where a node is. Arguments as `CoordinatorCore.saw` has them."""
        if not self._over and self.core.saw(node, address, now_ns=self.now_ns()):
            self.work()

    def when_durable(self, answer: Callable[[], None]) -> None:
        """Call `answer` when all that is decided by now is in the journal, and that is still ours. Else never."""
        self._answers.append(answer)
        self.work()

    def _on_timer(self) -> None:
        self._timer = None
        if not self._over:
            self.core.handle_timer(self.now_ns())
            self.work()

    # What goes out

    def work(self) -> None:
        """Carry out what the core wants, then sleep until it wants something again."""
        while self._writing is None and not (self._over or self._failed.done()):
            action = self.core.next_action()
            if action is None:
                if not self._answers:
                    break
                answers, self._answers = self._answers, []
                self._ask_journal(self._journal.confirm, partial(_call_all, answers))
            elif isinstance(action, Persist):
                self._ask_journal(partial(self._journal.append, action.record), _nothing)
            elif rests_on_journal(action):
                self._ask_journal(self._journal.confirm, partial(self._carry_out, action))
            else:
                if isinstance(action, Note) and isinstance(action.event, ViewInstalled):
                    self._led_view = True
                self._carry_out(action)
        if self._over or self._failed.done():
            return
        at = self.core.next_timer()
        # One that is set for an earlier time stays: to look in vain costs less than to set it anew with each message.
        if at is None or (self._timer is not None and self._timer_ns <= at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = at
        self._timer = self._loop.call_at(at / 1e9 + 1e-9, self._on_timer)

    def _ask_journal(self, call: Callable[[], None], then: Callable[[], None]) -> None:
        """Have the journal do something, and go on with `then` when it has."""
        if self._executor is None:
            try:
                call()
            except QuicollError as error:
                self._fail(error)
            else:
                then()
        else:
            self._writing_ns = self.now_ns()
            self._writing = self._loop.run_in_executor(self._executor, call)
            self._writing.add_done_callback(partial(self._written, then))

    def _written(self, then: Callable[[], None], call: asyncio.Future[None]) -> None:
        """Go on after a call of the journal on its thread."""
        self._writing = None
        error = call.exception()
        if self._over:
            return
        if error is not None:
            self._fail(error)
        else:
            then()
            self.work()

    def _fail(self, error: BaseException) -> None:
        if not isinstance(error, LeaseLost):  # of that the others know, and who stands by again says so
            log.critical("%s; nothing more can be decided", error)
        if not self.failed:
            self._failed.set_exception(error)

    # Its end

    def end(self) -> None:
        """Be over; further calls do nothing."""
        self._over = True
        self._answers.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._failed.cancel() and not self._failed.cancelled():
            self._failed.exception()  # whoever waits for it has it; nobody has to

    async def settled(self) -> None:
        """Wait until the journal's call that was under way has ended; it ends by itself."""
        if self._writing is not None:
            await asyncio.wait({self._writing})


def _nothing() -> None:
    """A record is there, and what follows from it is an action of its own."""


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
