"""The handle of an operation, as torch waits for it: a `Work` of our own.

    under way    its parts run on the engine; nothing has been written to the program's tensors
    ended        all parts have ended on the engine (`_ended`)
    settled      results are in the program's tensors, or the error is there (`_settled`); then callbacks run

From ended to settled somebody's thread copies the results: the one that waits, or asks whether it is over; one of the
pool where nobody waits or a future was asked for. Never the engine's, which other ranks wait for.

Traps of torch's, each of which has crashed a program or, worse, has not:

- `_create_work_from_future` gives a Work whose `wait` returns True after an error. Hence a class of our own.
- A future that carries `set_exception` ends the process in DDP's backward pass (segmentation fault). So `get_future`
  gives `base.then(f)`, where f raises: that arrives in C++ as an error that it expects.
- A Work that Python hands to C++ (DDP's `join` does, and `_register_work`) is held there without its part in Python.
  When that has gone, what is left never ends and has no future. So a Work is kept here until it is waited for or its
  future is asked for; if C++ waits for it, until the thread's next operation, because there the future is asked for
  after the wait. Of those that nobody asks for, the last `_KEPT` are kept.
- `wait(timedelta(0))`, as C++ calls it, is a wait without a bound of its own. The operation has one: its deadline on
  the engine. If the engine gave no answer a minute after that, this would raise, so no wait is for ever.
- A wait on the engine's own thread would wait for itself: refused. In the child of a fork nothing would ever come:
  refused.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch._C._distributed_c10d import Work

from quicoll import forks
from quicoll.errors import LocalError, QuicollError
from quicoll.torch_backend.asked import put
from quicoll.torch_backend.failures import CLOSED, add_words, for_torch, milliseconds, refused
from quicoll.torch_backend.pool import run_aside
from quicoll.torch_backend.staged import future_of
from quicoll.torch_backend.untraced import untraced

if TYPE_CHECKING:
    from quicoll.collectives.group import ThreadGroup
    from quicoll.torch_backend.profiled import ProfiledEvent

__all__ = ["OperationWork", "WorkHome", "WorkPart"]

_GRACE_S = 60.0  # after an operation's deadline, for the engine to say that it has passed
_KEPT = 1024
_THREADS = 64
_new_lock = threading.Lock

_unclaimed: OrderedDict[int, OperationWork] = OrderedDict()
# By thread, the last one that C++ has waited for. No threading.local: where C++ has made the thread, that ends when the
# wait returns.
_awaited: OrderedDict[int, OperationWork] = OrderedDict()


class WorkPart(Protocol):
    """One operation of a Work, as quicoll.collectives.context has it under way (`Pending`)."""

    @property
    def future(self) -> Any:
        """Done when it has ended, on the engine's thread; takes callbacks."""
        ...

    def attend_thread(self, *, ends: bool = False) -> None:
        """Take note that a thread waits for it from here on, or no longer (`ends`)."""
        ...

    def take_or_raise(self) -> Any:
        """Return the result of what has ended, or raise its error; on a caller's thread."""
        ...


class WorkHome:
    """What the Works of one group, in one view, have in common; no call makes it anew.

    engine_thread: whether the present thread is the engine's. noted: told of the end of each part, by its future,
    before anybody who waits. group: quicoll's. sequence: how many of its operations torch has counted. pid: of the
    process in which they are waited for.
    """

    __slots__ = ("engine_thread", "group", "noted", "pid", "sequence")

    def __init__(
        self,
        engine_thread: Callable[[], bool],
        noted: Callable[[Any], object] | None = None,
        group: ThreadGroup | None = None,
    ) -> None:
        """noted: None: nobody is told. group: None where nothing is issued by way of this."""
        self.engine_thread = engine_thread
        self.noted = noted
        self.group: Any = group
        self.sequence = 0
        self.pid = forks.pid


@untraced
class OperationWork(Work):
    """See the module's head. Every method may be called from any thread but the engine's."""

    # What most never change. (To set each of an object costs more than to make the object.)
    _waiting: tuple[threading.Lock, ...] = ()  # one of each thread that waits for it, which its end opens
    _base: Any = None
    _future: Any = None
    _ended = False
    _settled = False
    _error: BaseException | None = None
    _source = -1
    _event: ProfiledEvent | None = None
    _came = 0  # parts that have ended
    _finish: Callable[[list[Any]], object] | None = None
    _settling: threading.Lock | None = None

    def __init__(
        self,
        home: WorkHome,
        name: str,
        parts: Sequence[WorkPart],
        tensors: list[torch.Tensor],
        finish: Callable[[list[Any]], object] | None,
        within: float,
        *,
        began: float | None = None,
        event: ProfiledEvent | None = None,
    ) -> None:
        """Make the handle of operations that were issued.

        Args:
            home: The group that they are of.
            name: What was called, for errors.
            parts: The operations.
            tensors: Where the results go; what futures give.
            finish: Writes the parts' results there; called once, on a caller's thread. None: each goes to the tensor
                in its place.
            within: Seconds that the operations may take.
            began: By `time.monotonic`, before they were issued; None: now.
            event: In a profile; it ends when the last part has.
        """
        Work.__init__(self)
        self._home = home
        self._name = name
        self._parts = parts
        self._tensors = tensors
        if finish is not None:
            self._finish = finish
        self._within = within
        self._began = time.monotonic() if began is None else began
        self._lock = _new_lock()  # of what changes, but for what is settled
        if event is not None:
            self._event = event
        if not parts:
            self._ended = True
        for part in parts:
            part.future.add_done_callback(self._part_ended)
        if _awaited:
            _awaited.pop(threading.get_ident(), None)
        _unclaimed[id(self)] = self
        if len(_unclaimed) > _KEPT:
            _unclaimed.popitem(last=False)

    def __repr__(self) -> str:
        state = "settled" if self._settled else "ended" if self._ended else "under way"
        return f"<{self._name} {state}>"

    # -- what torch calls ----------------------------------------------------------------------------------------

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the results are in the tensors.

        Args:
            timeout: How long this wait may take; None and zero leave that to the operation's own timeout. C++ always
                gives one, a program hardly ever.
        Returns:
            True.
        Raises:
            QuicollError: The operation failed; a RuntimeError and a DistBackendError too. Or the time of this wait is
                over, and the operation goes on.
        """
        self._demand_thread()
        if timeout is not None:
            _awaited[threading.get_ident()] = self
            if len(_awaited) > _THREADS:
                _awaited.popitem(last=False)
        self._claim()
        if not self._settled:
            seconds = timeout.total_seconds() if timeout is not None else 0.0
            if not self._await_end(seconds if seconds > 0 else self._within + _GRACE_S):
                if seconds > 0:
                    raise refused(
                        f"{self._name}: the wait for it Timed out waiting {milliseconds(seconds)}; it goes on"
                    )
                raise refused(f"{self._name}: the engine has not ended it by {_GRACE_S:g} s after its deadline")
            self._settle()
        if self._error is not None:
            raise for_torch(self._error) from self._error.__cause__
        return True

    def is_completed(self) -> bool:
        """Return whether the operation is over, well or not; then its results are in the tensors."""
        if self._ended:
            self._settle()
        return self._settled

    def is_success(self) -> bool:
        """Return whether the results are in the tensors."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of an operation that failed."""
        return for_torch(self._error) if self.is_completed() and self._error is not None else None

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that the results go to."""
        return list(self._tensors)

    def synchronize(self) -> None:
        """Wait, as `wait` does."""
        self.wait()

    def source_rank(self) -> int:
        """Return the rank from which a receive from any rank has received; -1 while that is not known."""
        return self._source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Return a future of the tensors, which is done when the results are in them, or fails as `wait` would."""
        self._claim()
        with self._lock:
            if self._future is None:
                self._base = future_of(self._tensors)
                self._future = self._base.then(self._value)
                for part in self._parts:  # whoever waits for the future does so in C++, and says nothing
                    part.attend_thread()
            ended = self._ended
        if self._settled:
            self._settle()  # C++ that has waited takes the value without waiting for the future
        elif ended:
            run_aside(self._settle)
        return self._future

    def sent_by(self, rank: int) -> None:
        """Note who sends what this receives.

        Args:
            rank: Of the group.
        """
        self._source = rank

    # -- inside --------------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        """Somebody has asked for it, and holds it as long as it is needed."""
        _unclaimed.pop(id(self), None)

    def _await_end(self, seconds: float) -> bool:
        """Block until all parts have ended, or so many seconds have passed. Return whether they have."""
        with self._lock:
            if self._ended:
                return True
            mine = _new_lock()
            mine.acquire()
            self._waiting = (*self._waiting, mine)
        parts = self._parts  # which are gone when another thread has handed the results over
        try:
            for part in parts:
                part.attend_thread()
            mine.acquire(timeout=seconds)
        finally:
            if not self._ended:  # else nobody asks any more whether somebody waits
                for part in parts:
                    part.attend_thread(ends=True)
            with self._lock:
                if self._waiting == (mine,):  # as mostly
                    self._waiting = ()
                else:
                    self._waiting = tuple([each for each in self._waiting if each is not mine])
        return self._ended

    def _value(self, _: Any) -> list[torch.Tensor]:
        if self._error is not None:
            raise for_torch(self._error)
        return self._tensors

    def _demand_thread(self) -> None:
        if forks.pid != self._home.pid:
            raise refused(f"{self._name} was called by the parent of this process, which alone can wait for it")
        if self._home.engine_thread():
            raise refused(f"{self._name} is waited for on the engine's own thread, which would wait for itself")

    def _part_ended(self, ended: Any) -> None:
        """On the engine's thread, or on the caller's where the part had ended before."""
        if self._home.noted is not None:
            self._home.noted(ended)
        with self._lock:
            self._came += 1
            if self._came < len(self._parts):
                return
        if self._event is not None:
            self._event.end(self._over)
        else:
            self._over()

    def _over(self) -> None:
        """All parts have ended, and the event in a profile: who waits may stop the profiler."""
        with self._lock:
            self._ended = True
            for each in self._waiting:
                each.release()
            aside = not self._waiting or self._base is not None
        if aside:
            try:
                run_aside(self._settle)
            except RuntimeError:  # the interpreter is ending: nobody will ask
                return

    def _settle(self) -> None:
        """Hand the results over, once; who comes second waits until that is done."""
        with self._lock:
            if self._settling is None:
                self._settling = _new_lock()
            settling = self._settling
        with settling:
            if not self._settled:
                try:
                    parts = self._parts
                    lone = len(parts) == 1  # as mostly: no function for a list of it
                    results = [parts[0].take_or_raise()] if lone else [part.take_or_raise() for part in parts]
                    if self._finish is not None:
                        with torch.no_grad():
                            self._finish(results)
                    else:
                        for tensor, result in zip(self._tensors, results, strict=True):
                            put(tensor, result)
                except BaseException as error:  # whoever waits raises it
                    self._error = self._worded(error)
                self._parts, self._finish = (), None
                self._settled = True
            with self._lock:
                base, self._base = self._base, None
        if base is not None:
            base.set_result(None)

    def _worded(self, error: BaseException) -> BaseException:
        """Add the words that torch's programs look for, where the operation's time has passed or a rank is gone."""
        if not isinstance(error, QuicollError) or error.usable or isinstance(error, LocalError):
            return error
        if time.monotonic() - self._began >= self._within:
            add_words(error, f"Timed out waiting {milliseconds(self._within)}")
        elif error.lost:
            add_words(error, CLOSED)
        return error
