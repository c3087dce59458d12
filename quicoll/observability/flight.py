"""The flight recorder: what this rank did last, kept in memory, so that it can be read when something has failed.

It keeps the last operations, steps and events in rings, and of the views that broke what was under way at that moment
and whose call it waited for. Nothing is written here: `keep` is called when something fails, and whoever that is takes
a `snapshot`, in its own time and on its own thread (quicoll.observability.flight_files).

What each operation costs is a list of a dozen references and one time. Everything else is found out when it is asked
for, or when a view breaks:

    called      an entry is in the ring; its time is what the operation's deadline was made of
    finished    the entry has its end. One that failed over QUIC says so; one through memory that has no end was under
                way at the time of writing, or ended with its view
    streamed    where somebody wants all of them and not the last ones (`FlightStream`), it goes there as well, to be
                taken out on a thread of that one's own once it has its end

Threads. Operations through memory are called and ended by callers' threads, all others on the engine's. An entry is
written to by whoever holds the operation at that moment, rings are appended to, and a snapshot copies each ring in one
step of the interpreter: no lock. A snapshot may have an entry in the middle of its end, whose time is there and whose
outcome is not; it says "" then, which is true of the moment before.

Invariants: nothing grows with the number of operations, steps or views; no tensor is held; nothing here waits, raises
for what it was given, or iterates over a set.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from quicoll.checks import MAX_MEMBERS
from quicoll.observability.flight_record import (
    FLIGHT_FORMAT,
    MAX_STACK,
    AwaitedCall,
    BrokenView,
    FlightEvent,
    FlightFile,
    FlightHeader,
    FlightOperation,
    FlightRecord,
    FlightStep,
    FlightView,
    LateStack,
    ProcessEnd,
)
from quicoll.observability.sentences import sentence

__all__ = [
    "ENDED",
    "EVENTS",
    "GIVEN",
    "OPERATIONS",
    "STEPS",
    "CalledEntry",
    "FlightRecorder",
    "FlightStream",
    "Streamed",
    "UnderWay",
    "ViewRecorder",
    "event_record",
]

OPERATIONS = 512
STEPS = 128
EVENTS = 256
_BROKEN = 32
_STACKS = 16
_HEARD = 64
"""Ranks of an operation whose calls' times are kept: with more, the times of 512 operations would be megabytes."""

CalledEntry: TypeAlias = "list[Any]"
ENDED: Final = 6
"""Where an entry has the time of its end, in seconds of the loop's clock, which who ends a call through memory sets."""
_VIEW, _OUTCOME, _ALGORITHM, _HEARD_NS = 0, 7, 8, 9
GIVEN: Final = 10
"""Where an entry has how many bytes this rank gives, as far as that is known."""
_STREAMED = 1 << 16
"""Entries that wait in a stream to be taken out; with more, new ones are left out and counted."""
_NAME, _TEXT = 256, 2048  # characters, as the records bound them

_KEPT = {
    "listening",
    "view_installed",
    "shared_memory",
    "lane_shut",
    "lane_lost",
    "view_ended",
    "step_aborted",
    "peer_lost",
    "held",
    "state_received",
    "state_handed",
    "state_differs",
    "state_torn",
    "state_learning",
    "state_learned",
    "standing_by",
    "shards_received",
    "tiers_refused",
    "piece_refused",
    "straggler",
    "refused",
    "dismissed",
    "job_done",
    "certificates_rotated",
    "certificate_denied",
    "fault",
}
"""Kinds of events that are kept; commits are seen at the steps."""
_TROUBLE = {"step_aborted", "peer_lost", "refused", "state_differs", "state_torn"}
"""Those of them that are written down at once."""


class UnderWay(NamedTuple):
    """An operation that has not ended. called: in seconds of the loop's clock. absent: by rank whose call of it has not
    come, what that has called instead; "" where nothing is known of it."""

    name: str
    what: str
    step: int | None
    called: float
    absent: Mapping[int, str]


class ViewRecorder:
    """The recorder as the operations of one view use it."""

    __slots__ = ("_append", "_recorder", "nodes", "view")

    def __init__(self, recorder: FlightRecorder, view: int, nodes: Sequence[str]) -> None:
        self._recorder = recorder
        self._append = recorder.append
        self.view = view
        self.nodes = nodes

    def called(self, name: str, what: str, step: int | None, carrier: str, at: float, given: int = 0) -> CalledEntry:
        """Note a call.

        Args:
            name: Of the operation, as errors have it.
            what: Everything that has to be equal on all ranks.
            step: The open one.
            carrier: "quic" or "memory".
            at: When, in seconds of the loop's clock.
            given: Bytes that this rank gives, where that is known.
        Returns:
            Its entry, for its end.
        """
        entry: CalledEntry = [self, name, what, step, carrier, at, 0.0, "", "", None, given]
        self._append(entry)
        return entry

    def ended(
        self, entry: CalledEntry, at: float, *, finished: bool, algorithm: str, heard_ns: Mapping[int, int]
    ) -> None:
        """Note the end of an operation over QUIC.

        Args:
            entry: What `called` gave.
            at: When, in seconds of the loop's clock.
            finished: Whether it went well.
            algorithm: Of its plan; "" where it has come to none.
            heard_ns: By rank, when its call came to be known here.
        """
        entry[_OUTCOME] = "finished" if finished else "aborted"
        entry[_ALGORITHM] = algorithm
        if len(heard_ns) <= _HEARD:
            entry[_HEARD_NS] = heard_ns
        entry[ENDED] = at

    def broke(self, error: Exception, under_way: Sequence[UnderWay], *, seen: bool) -> None:
        """Note that the view is over here.

        Args:
            error: Why; one of ours says which node it names.
            under_way: What had not ended then.
            seen: Whether it was found here, and not told by the coordinator.
        """
        self._recorder.broke(self.view, self.nodes, error, under_way, seen=seen)


class FlightRecorder:
    """See the module's head. An observer of the rank's events."""

    def __init__(
        self,
        *,
        job: str,
        node: str,
        process: str,
        clock: str,
        host: str,
        now_ns: Callable[[], int],
        wall_ns: Callable[[], int],
        role: str = "rank",
        stream: FlightStream | None = None,
    ) -> None:
        """Begin with nothing.

        Args:
            job: The job's name.
            node: This rank's name.
            process: What tells this process from earlier ones of the node.
            clock: Which monotonic clock `now_ns` reads; equal in processes that share it.
            host: The host's name, for people.
            now_ns: Nanoseconds of the loop's clock; any thread may ask.
            wall_ns: Nanoseconds since 1970.
            role: "rank" or "supervisor".
            stream: Gets all of it as well; None where nobody wants more than the last.
        """
        self.keep: Callable[[], None] = lambda: None
        """Called when something is to be written down, on the thread where it happened. Must be quick."""
        self.flush: Callable[[], object] = lambda: None
        """Waits for a moment until that is done."""
        self.close: Callable[[], None] = lambda: None
        """Called at the end."""
        self.unwritten: Callable[[str], None] = lambda reason: None
        """Called with why nothing can be written down, on any thread."""
        self.operations: deque[CalledEntry] = deque(maxlen=OPERATIONS)
        self._stream = stream
        self.append: Callable[[CalledEntry], None] = self.operations.append
        """Takes an entry in."""
        if stream is not None:
            self.append = stream.beside(self.operations)
        self._steps: deque[list[Any]] = deque(maxlen=STEPS)
        self._events: deque[FlightEvent] = deque(maxlen=EVENTS)
        self._views: deque[FlightView] = deque(maxlen=_BROKEN)
        self._broken: deque[BrokenView] = deque(maxlen=_BROKEN)
        self._stacks: deque[LateStack] = deque(maxlen=_STACKS)
        self._ends: deque[ProcessEnd] = deque(maxlen=EVENTS)
        self._now_ns = now_ns
        self._wall_ns = wall_ns
        self.node = node
        self._who: dict[str, Any] = {
            "job": job,
            "node": node,
            "process": process,
            "clock": clock,
            "host": host,
            "role": role,
        }
        self._why = ""
        self._left = ""

    # -- what happens --------------------------------------------------------------------------------------------

    def __call__(self, event: Any) -> None:
        """Take an event (`quicoll.Event`)."""
        kind, fields = event.kind, event.fields
        if self._stream is not None:
            self._stream.events.append(event)
        if kind in ("step_committed", "step_aborted"):
            self._step_over(fields.get("step"), event.t_ns, kind.removeprefix("step_"))
        if kind not in _KEPT:
            return
        self._events.append(event_record(event))
        if kind in _TROUBLE or (kind == "view_ended" and fields.get("lost")):
            self._note(sentence(kind, fields))

    def began(self, step: int, view: int) -> None:
        """Note that a step begins."""
        entry = [step, view, self._now_ns(), 0, ""]
        self._steps.append(entry)
        if self._stream is not None:
            self._stream.steps.append(entry)

    def _step_over(self, step: object, at: int, outcome: str) -> None:
        for entry in reversed(self._steps):
            if entry[0] == step:
                entry[3], entry[4] = at, outcome
                return

    def in_view(self, view: int, nodes: Sequence[str], mark: str) -> ViewRecorder:
        """Note that a view is installed, and return the recorder for its operations.

        Args:
            view: Its id.
            nodes: Its members, by rank.
            mark: What is the same for all processes in it, and another one in any other view.
        """
        installed = FlightView(t=self._now_ns(), view=view, mark=mark, nodes=_names(nodes))
        self._views.append(installed)
        if self._stream is not None:
            self._stream.views.append(installed)
        return ViewRecorder(self, view, nodes)

    def broke(
        self, view: int, nodes: Sequence[str], error: Exception, under_way: Sequence[UnderWay], *, seen: bool
    ) -> None:
        """As `ViewRecorder.broke`, for a view of these nodes, by rank."""
        if self._left:  # it is this rank that ends it, for itself
            return
        awaited = tuple(
            AwaitedCall(
                name=_clip(each.name, _NAME),
                what=_clip(each.what, _TEXT),
                step=each.step,
                called=round(each.called * 1e9),
                absent=tuple(nodes[rank] for rank in each.absent),
                instead={nodes[rank]: _clip(text, _TEXT) for rank, text in each.absent.items() if text},
            )
            for each in under_way[:_BROKEN]
        )
        text = getattr(error, "message", str(error))
        self._broken.append(
            BrokenView(
                t=self._now_ns(),
                view=view,
                seen=seen,
                error=type(error).__name__,
                text=_clip(text, _TEXT),
                node=_clip(getattr(error, "node", ""), _NAME),
                lost=_names(getattr(error, "lost", ())),
                awaited=awaited,
            )
        )
        self._note(f"view {view} is over: {text}")

    def stack(self, node: str, text: str) -> None:
        """Note where the threads of a late node were, or why that is not known."""
        self._stacks.append(LateStack(t=self._now_ns(), node=_clip(node, _NAME), text=_clip(text, MAX_STACK)))
        self._note(f"{node} is late")

    def process_ended(self, node: str, process: str, status: int, text: str) -> None:
        """Note the end of a process, for a supervisor.

        Args:
            node: Whose it was.
            process: Its id.
            status: As of `Popen.returncode`.
            text: The same in words.
        """
        self._ends.append(
            ProcessEnd(
                t=self._now_ns(), node=_clip(node, _NAME), process=process, status=status, text=_clip(text, _TEXT)
            )
        )
        self._note(f"{node} ended with {text}")

    def left(self, reason: str) -> None:
        """Note that this rank leaves; the first reason counts. reason: in words; "done" where its work has ended as it
        should. Written down in any case: a process without a file was killed."""
        self._left = self._left or reason
        self._note(f"this rank leaves: {self._left}")

    def asked(self, why: str) -> None:
        """Somebody wants a file now."""
        self._note(why)

    def _note(self, why: str) -> None:
        self._why = why
        self.keep()

    # -- what is kept --------------------------------------------------------------------------------------------

    def snapshot(self) -> FlightFile:
        """Return what is kept now. From any thread."""
        records: list[FlightRecord] = [operation_record(entry) for entry in list(self.operations)]
        records += [_step_record(entry) for entry in list(self._steps)]
        records += [
            *list(self._events),
            *list(self._stacks),
            *list(self._views),
            *list(self._broken),
            *list(self._ends),
        ]
        header = FlightHeader(
            format=FLIGHT_FORMAT,
            t=self._now_ns(),
            wall=self._wall_ns(),
            why=_clip(self._why, _TEXT),
            left=_clip(self._left, _TEXT),
            **self._who,
        )
        return FlightFile(header=header, records=tuple(records))


Streamed: TypeAlias = "FlightOperation | FlightStep | FlightView | Any"
"""What a stream gives: records, and events (`quicoll.Event`) as they were told."""


class FlightStream:
    """All that a recorder is told, for who writes it down or counts it while the job runs.

    Whoever calls operations appends to it; one other thread takes out what is over (`drain`), in the order of its ends
    as far as that is seen. An entry waits here until it has its end, or until its view is over and another one is
    installed, which ends it. `dropped`: how many were left out because _STREAMED waited.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.dropped = 0
        self.operations: deque[CalledEntry] = deque()
        self.steps: deque[list[Any]] = deque(maxlen=_STREAMED)
        self.events: deque[Any] = deque(maxlen=_STREAMED)
        self.views: deque[FlightView] = deque(maxlen=_STREAMED)
        self._waiting: list[CalledEntry] = []
        self._begun: list[list[Any]] = []
        self._view: FlightView | None = None

    def beside(self, ring: deque[CalledEntry]) -> Callable[[CalledEntry], None]:
        """Return what appends an entry to `ring` and to this."""
        keep, take, here = ring.append, self.operations.append, self.operations

        def append(entry: CalledEntry) -> None:
            keep(entry)
            if len(here) < _STREAMED:
                take(entry)
            else:
                self.dropped += 1

        return append

    def drain(self, *, last: bool = False) -> list[Streamed]:
        """Take out what is over, on the one thread that does this.

        Args:
            last: Take the rest too, as it is: nothing comes any more.
        Returns:
            Views, steps, operations, events, each kind in its order.
        """
        views = _taken(self.views)
        steps = [*self._begun, *_taken(self.steps)]
        self._begun.clear()
        operations = [*self._waiting, *_taken(self.operations)]
        self._waiting.clear()
        if views:
            self._view = views[-1]
        found: list[Streamed] = [*views]
        for entry in steps:
            if entry[4] or last or (self._view is not None and entry[1] < self._view.view):
                found.append(_step_record(entry))
            else:
                self._begun.append(entry)
        for entry in operations:
            over = self._view is not None and entry[_VIEW].view < self._view.view
            if entry[ENDED] or over or last:
                found.append(operation_record(entry))
            elif len(self._waiting) < _STREAMED:
                self._waiting.append(entry)
            else:
                self.dropped += 1
        return [*found, *_taken(self.events)]


def _taken(queue: deque[Any]) -> list[Any]:
    """What is in a queue that others append to."""
    return [queue.popleft() for _ in range(len(queue))]


def operation_record(entry: CalledEntry) -> FlightOperation:
    """Return an entry as it is now, as a record."""
    within, name, what, step, carrier, called, ended, outcome, algorithm, heard, given = entry
    return FlightOperation(
        view=within.view,
        name=_clip(name, _NAME),
        what=_clip(what, _TEXT),
        step=step,
        carrier=carrier,
        algorithm=algorithm,
        called=round(called * 1e9),
        settled=max(heard.values(), default=0) if heard and outcome == "finished" else 0,
        ended=round(ended * 1e9),
        outcome=outcome or ("finished" if ended else ""),
        heard={within.nodes[rank]: at for rank, at in heard.items()} if heard else {},
        given=given,
    )


def _step_record(entry: list[Any]) -> FlightStep:
    step, view, began, ended, outcome = entry
    return FlightStep(step=step, view=view, began=began, ended=ended, outcome=outcome)


def event_record(event: Any) -> FlightEvent:
    """Return an event (`quicoll.Event`) as a record."""
    lost = event.fields.get("lost")
    nodes = event.fields.get("nodes") if lost is None else lost
    return FlightEvent(
        t=event.t_ns,
        what=_clip(event.kind, _NAME),
        text=_clip(sentence(event.kind, event.fields), _TEXT),
        view=_number(event.fields.get("view")),
        node=_clip(str(event.fields.get("peer", "")), _NAME),
        nodes=_names(nodes if isinstance(nodes, list | tuple) else ()),
    )


def _clip(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _names(nodes: Sequence[object]) -> tuple[str, ...]:
    return tuple(_clip(str(node), _NAME) for node in nodes[:MAX_MEMBERS])


def _number(value: object) -> int:
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else 0
