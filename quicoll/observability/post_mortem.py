"""What is concluded from the files of flight recorders: who was lost or late, who only gave up because of it.

A view that breaks leaves on each of its ranks what that rank saw itself, and what the coordinator told all of them. Of
each such view, which the files tell apart by its mark and not by its number (there may be files of several runs):

    what the coordinator told counts: it had heard all ranks. Where some ranks were told that they are cut off and
    others who was lost, the others count: they are the ones with a quorum
    lost          it names nodes that are gone. One that wrote itself why it left has `left`, the others are `lost`;
                  one whose work had ended as it should is no failure
    late          it names a node whose call of an operation others were waiting for
    mismatch, corrupted, failed    it names a node, by the kind of its error
    cut off       only cut-off ranks have written: the coordinator was gone, or they were
    changed       nobody is named: the view made place for another one. That is no failure
    Where no rank has heard from the coordinator, what most of them saw counts, and that is said

A node that has left no file, since SIGKILL or a power cut leaves nobody time for one, is known by what others wrote:
the last of its calls that they heard, the last operation of all ranks that ended, which it must have called; and by how
its process ended, where a supervisor wrote that.

Everything here is a pure function of the files. Their texts come from other hosts and are made `printable` where they
are put into a sentence; nothing is concluded from the words of a text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from quicoll.observability.flight_clocks import ClockOffset, clock_offsets
from quicoll.observability.flight_record import (
    AwaitedCall,
    BrokenView,
    FlightEvent,
    FlightFile,
    FlightOperation,
    FlightStep,
    FlightView,
    LateStack,
    ProcessEnd,
    printable,
)

__all__ = ["EndOfView", "LastSeen", "PostMortem", "conclude", "told_in_sentences"]

_ENDS = 16
_NAMED = 8
_STACK_NS = 60_000_000_000
_CUT_OFF = "Partitioned"
_KINDS = {"Mismatch": "mismatch", "Corrupted": "corrupted"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EndOfView:
    """How one view ended.

    Attributes:
        view: Its number.
        nodes: Its members, by rank.
        at_ns: When the first rank wrote so, by the clock of reference.
        kind: "lost", "left", "late", "mismatch", "corrupted", "failed", "cut off" or "changed".
        culprits: The nodes that caused it, none where no one is named.
        gave_up: Nodes that ended their part only because of that, by rank.
        cut_off: Nodes that were told that they are cut off.
        told: What the coordinator told; "" where no rank has heard of it.
        seen: By node, what it had seen before.
        awaited: What was under way and waited for calls: of each operation the one with the most absent nodes.
        last: Of each culprit, what is known last of it in this view.
    """

    view: int
    nodes: tuple[str, ...]
    at_ns: int
    kind: str
    culprits: tuple[str, ...]
    gave_up: tuple[str, ...]
    cut_off: tuple[str, ...] = ()
    told: str = ""
    seen: dict[str, str] = field(default_factory=dict)
    awaited: tuple[AwaitedCall, ...] = ()
    last: dict[str, LastSeen] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastSeen:
    """What is known last of one node: of all, or in one view.

    Attributes:
        node: Its name.
        written: Whether it has left a file.
        host: Where it ran, as it said.
        why: What its last file was written for.
        left: Why it left the job, as it wrote itself.
        heard: Why the view was over, as it wrote itself; of one view.
        operation: Its last call; from the files of others, where it has left none.
        own: Whether `operation` is from its own file.
        step: The last step that it began.
        last_event: In a sentence.
        stack: Where its threads were when it was late.
        ended: How its process ended, by the supervisor.
    """

    node: str
    written: bool
    host: str = ""
    why: str = ""
    left: str = ""
    heard: str = ""
    operation: FlightOperation | None = None
    own: bool = True
    step: FlightStep | None = None
    last_event: str = ""
    stack: str = ""
    ended: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PostMortem:
    """What is concluded. Times are of the clock of reference; `wall_ns` is added for the time of day.

    Attributes:
        job: Its name.
        ends: How views ended, in their order; the last ones, where there are many.
        nodes: What is known last of each node, by name.
        clocks: By clock, how it is related to the clock of reference.
        wall_ns: What makes nanoseconds since 1970 of its times.
        remarks: What is missing, or wrong with the files, a sentence each.
    """

    job: str
    ends: tuple[EndOfView, ...]
    nodes: dict[str, LastSeen]
    clocks: dict[str, ClockOffset]
    wall_ns: int
    remarks: tuple[str, ...]


class _Files:
    """The files of one job, with their times on one clock."""

    def __init__(self, files: Iterable[FlightFile]) -> None:
        self.all = list(files)
        self.ranks = [file for file in self.all if file.header.role == "rank"]
        self.clocks = clock_offsets(self.all)

    def at(self, file: FlightFile, t: int) -> int:
        return t + self.clocks[file.header.clock].offset_ns

    def last_of(self, node: str, mark: str | None = None) -> FlightFile | None:
        """The last file of a node; of those that have a view with this mark."""
        mine = [file for file in self.ranks if file.header.node == node and (mark is None or _view_in(file, mark))]
        return max(mine, key=lambda file: (file.header.wall, file.header.process), default=None)


def _view_in(file: FlightFile, mark: str) -> FlightView | None:
    return next((view for view in file.of(FlightView) if view.mark == mark), None)


def conclude(files: Iterable[FlightFile]) -> PostMortem:
    """Say what happened.

    Args:
        files: Of one directory; those of another job than most are left out, which is said.
    """
    every = list(files)
    jobs: dict[str, int] = {}
    for file in every:
        jobs[file.header.job] = jobs.get(file.header.job, 0) + 1
    job = min(jobs, key=lambda name: (-jobs[name], name), default="")
    known = _Files(file for file in every if file.header.job == job)
    remarks = []
    if len(known.all) < len(every):
        remarks.append(f"{len(every) - len(known.all)} files are of other jobs and are left out")
    ends = _ends(known)
    named = {node: None for end in ends for node in end.nodes} | {file.header.node: None for file in known.ranks}
    nodes = {node: _last_seen(known, node) for node in sorted(named)}
    missing = [node for node in nodes if not nodes[node].written]
    if missing:
        remarks.append(
            f"no file of {_list(missing)}: what is said of {'it' if len(missing) == 1 else 'them'} is from others"
        )
    for file in known.all:
        remarks += [f"the file of {printable(file.header.node, 64)}: {each}" for each in file.trouble]
    remarks += _clock_remarks(known)
    reference = next((f for f in known.all if known.clocks[f.header.clock] == ClockOffset(0, 0)), None)
    wall_ns = 0 if reference is None else reference.header.wall - reference.header.t
    return PostMortem(job=job, ends=ends, nodes=nodes, clocks=known.clocks, wall_ns=wall_ns, remarks=tuple(remarks))


def _clock_remarks(known: _Files) -> list[str]:
    hosts = {file.header.clock: printable(file.header.host, 64) for file in known.all}
    remarks = []
    for clock, offset in sorted(known.clocks.items()):
        if offset.bound_ns is None:
            remarks.append(
                f"times of host {hosts[clock]} are by its wall clock, which could be compared with no other here"
            )
        elif offset.bound_ns:
            remarks.append(f"times of host {hosts[clock]} are right to {offset.bound_ns / 1e6:.2f} ms")
    return remarks


def _ends(known: _Files) -> tuple[EndOfView, ...]:
    members: dict[str, tuple[int, tuple[str, ...]]] = {}
    broken: dict[str, list[tuple[FlightFile, BrokenView]]] = {}
    for file in known.ranks:
        marks = {}
        for view in file.of(FlightView):
            marks[view.view] = view.mark
            members.setdefault(view.mark, (view.view, view.nodes))
        for each in file.of(BrokenView):
            if each.view in marks:
                broken.setdefault(marks[each.view], []).append((file, each))
    ends = [_end_of(known, mark, *members[mark], said) for mark, said in broken.items()]
    ends.sort(key=lambda end: (end.at_ns, end.view))
    return tuple(ends[-_ENDS:])


def _end_of(
    known: _Files, mark: str, view: int, nodes: tuple[str, ...], said: Sequence[tuple[FlightFile, BrokenView]]
) -> EndOfView:
    told = [(file.header.node, each) for file, each in said if not each.seen]
    seen = [(file.header.node, each) for file, each in said if each.seen]
    cut_off = [node for node, each in told if each.error == _CUT_OFF]
    heard = [each for _, each in told if each.error != _CUT_OFF]
    awaited = _awaited(each for _, each in said)
    absent = {node for call in awaited for node in call.absent}
    if heard:
        verdict: BrokenView | None = heard[0]
    elif told:
        verdict = None
    else:
        verdict = _most(each for _, each in seen)
    kind, culprits = "cut off", tuple(sorted(cut_off))
    if verdict is not None:
        kind, culprits = _blamed(known, mark, verdict, absent)
    wrote = {file.header.node for file, _ in said}
    gave_up = tuple(node for node in nodes if node in wrote and node not in culprits) if kind != "changed" else ()
    at_ns = min(known.at(file, each.t) for file, each in said)
    return EndOfView(
        view=view,
        nodes=nodes,
        at_ns=at_ns,
        kind=kind,
        culprits=culprits,
        gave_up=gave_up,
        cut_off=tuple(sorted(cut_off)),
        told=heard[0].text if heard else told[0][1].text if told else "",
        seen={node: each.text for node, each in seen},
        awaited=awaited,
        last={node: _last_seen(known, node, mark, at_ns) for node in culprits},
    )


def _most(seen: Iterable[BrokenView]) -> BrokenView | None:
    """What most ranks saw, by whom they name."""
    by: dict[tuple[str, ...], list[BrokenView]] = {}
    for each in seen:
        by.setdefault(each.lost or (each.node,), []).append(each)
    return min(by.items(), key=lambda item: (-len(item[1]), item[0]))[1][0] if by else None


def _blamed(known: _Files, mark: str, verdict: BrokenView, absent: set[str]) -> tuple[str, tuple[str, ...]]:
    if verdict.lost:
        lost = tuple(node for node in verdict.lost if _left_in(known, mark, node) != "done")
        if not lost:
            return "changed", ()
        return "left" if all(_left_in(known, mark, node) for node in lost) else "lost", lost
    if not verdict.node:
        return _KINDS.get(verdict.error, "changed"), ()
    if verdict.error in _KINDS:
        return _KINDS[verdict.error], (verdict.node,)
    own = known.last_of(verdict.node, mark)
    blames_itself = own is not None and any(each.seen and each.node == verdict.node for each in _broken_in(own, mark))
    return "late" if verdict.node in absent and not blames_itself else "failed", (verdict.node,)


def _broken_in(file: FlightFile, mark: str) -> list[BrokenView]:
    view = _view_in(file, mark)
    return [each for each in file.of(BrokenView) if view is not None and each.view == view.view]


def _left_in(known: _Files, mark: str, node: str) -> str:
    """Why a node left while it was in a view, as it wrote itself; "" where it did not."""
    file = known.last_of(node, mark)
    return "" if file is None or _broken_in(file, mark) or file.of(FlightView)[-1].mark != mark else file.header.left


def _awaited(said: Iterable[BrokenView]) -> tuple[AwaitedCall, ...]:
    found: dict[str, AwaitedCall] = {}
    for each in said:
        for call in each.awaited:
            if call.absent and (call.name not in found or len(call.absent) > len(found[call.name].absent)):
                found[call.name] = call
    return tuple(found.values())


def _last_seen(known: _Files, node: str, mark: str | None = None, at_ns: int | None = None) -> LastSeen:
    """What is known last of a node; with a mark, in that view, which ended at that time."""
    file = known.last_of(node, mark)
    stack, ended = _stack_of(known, node, at_ns), _end_of_process(known, node, at_ns)
    if file is None:
        operation = _heard_of(known, node, mark)
        return LastSeen(node=node, written=False, operation=operation, own=False, stack=stack, ended=ended)
    within = None if mark is None else _view_in(file, mark)
    operations = [each for each in file.of(FlightOperation) if within is None or each.view == within.view]
    steps = [each for each in file.of(FlightStep) if within is None or each.view == within.view]
    broken = [] if mark is None else _broken_in(file, mark)
    events = [each for each in file.of(FlightEvent) if at_ns is None or known.at(file, each.t) <= at_ns]
    return LastSeen(
        node=node,
        written=True,
        host=file.header.host,
        why=file.header.why,
        left=file.header.left if mark is None else _left_in(known, mark, node),
        heard=broken[-1].text if broken else "",
        operation=max(operations, key=lambda each: each.called, default=None),
        step=max(steps, key=lambda each: each.began, default=None),
        last_event=max(events, key=lambda each: each.t).text if events else "",
        stack=stack,
        ended=ended,
    )


def _stack_of(known: _Files, node: str, at_ns: int | None) -> str:
    """The stack that was taken of a node last, and not long before a view ended."""
    found: tuple[int, str] | None = None
    for file in known.all:
        for each in file.of(LateStack):
            at = known.at(file, each.t)
            near = at_ns is None or abs(at - at_ns) < _STACK_NS
            if each.node == node and near and (found is None or at > found[0]):
                found = at, each.text
    return "" if found is None else found[1]


def _end_of_process(known: _Files, node: str, at_ns: int | None) -> str:
    """How the process of a node ended, the last one or the one whose end is the nearest to a time."""
    ends: list[tuple[int, str]] = [
        (known.at(file, each.t), each.text) for file in known.all for each in file.of(ProcessEnd) if each.node == node
    ]
    if not ends:
        return ""
    return (max(ends) if at_ns is None else min(ends, key=lambda end: (abs(end[0] - at_ns), end)))[1]


def _heard_of(known: _Files, node: str, mark: str | None) -> FlightOperation | None:
    """The last call of a node that others know of: heard, or of all ranks and ended, which it must have called."""
    found: tuple[int, FlightOperation] | None = None
    for file in known.ranks:
        views = {view.view: view for view in file.of(FlightView) if mark in (None, view.mark)}
        for each in file.of(FlightOperation):
            if each.view not in views:
                continue
            at = each.heard.get(node, 0)
            if not at and each.outcome == "finished" and "@" not in each.name and node in views[each.view].nodes:
                at = each.ended
            if at and (found is None or known.at(file, at) > found[0]):
                found = known.at(file, at), each
    return None if found is None else found[1]


# ---------------------------------------------------------------------------------------------------------------------
# In sentences


def told_in_sentences(found: PostMortem) -> list[str]:
    """Return a post-mortem for people, a line each; what belongs to the line above is indented."""
    lines = [f"job {printable(found.job, 64)}"]
    failures = [end for end in found.ends if end.kind != "changed"]
    if not failures:
        lines.append("no view has failed, as far as the files say")
    for end in failures:
        lines += ["", *_told_end(found, end)]
    lines += ["", "what each node did last"]
    for node in found.nodes.values():
        lines += _told_node(node)
    return [*lines, *(["", *found.remarks] if found.remarks else [])]


def _told_end(found: PostMortem, end: EndOfView) -> list[str]:
    who = _list(end.culprits)
    one = len(end.culprits) == 1
    what = {
        "lost": f"{who} {'was' if one else 'were'} lost",
        "left": f"{who} left the job",
        "late": f"{who} {'was' if one else 'were'} late",
        "mismatch": f"the ranks called different things{f', {who} among them' if who else ''}",
        "corrupted": f"bits were not what they should be{f'; named is {who}' if who else ''}",
        "failed": f"{who} failed",
        "cut off": f"{who or 'its ranks'} could not reach the coordinator",
    }[end.kind]
    ranks = f"{len(end.nodes)} rank{'s' if len(end.nodes) != 1 else ''}"
    lines = [f"{_time(found, end.at_ns)} view {end.view} of {ranks} ended: {what}"]
    if end.told:
        by = "the coordinator said" if end.kind != "cut off" else "the ranks concluded"
        lines.append(f"    {by}: {printable(end.told)}")
    else:
        lines.append("    nothing was heard from the coordinator: this is what most ranks saw")
    for call in end.awaited:
        step = f" of step {call.step}" if call.step is not None else ""
        lines.append(f"    {printable(call.name, 64)}{step} waited for the call of {_list(call.absent)}")
        lines += [
            f"        {printable(node, 64)} had called {printable(text, 200)} instead"
            for node, text in call.instead.items()
        ]
    for node in end.culprits[:_NAMED]:
        lines += _told_culprit(end.last[node], lost=end.kind == "lost")
    if end.gave_up:
        only = " only" if end.culprits else ""
        lines.append(f"    {_list(end.gave_up)} gave up{only} because of that")
    others = [node for node in end.cut_off if node not in end.culprits]
    if others:
        lines.append(f"    {_list(others)} had lost the coordinator by then")
    return lines


def _told_culprit(node: LastSeen, *, lost: bool) -> list[str]:
    name = printable(node.node, 64)
    lines = []
    if not node.written:
        lines.append(f"    {name} wrote no file: its process was killed, or its host or its disk is gone")
    if lost and node.heard:
        lines.append(f"    {name} itself was there again later, and heard: {printable(node.heard)}")
    if node.left:
        lines.append(f"    {name} wrote why it left: {printable(node.left)}")
    if node.ended:
        lines.append(f"    the supervisor saw the process of {name} end with {printable(node.ended, 200)}")
    lines.append(f"    {name} {_did(node)}")
    if node.stack:
        lines.append(f"    where {name} was when it was late:")
        lines += [f"        {printable(line, 200)}" for line in node.stack.split("\n")]
    return lines


def _told_node(node: LastSeen) -> list[str]:
    name = printable(node.node, 64)
    lines = [f"    {name} {_did(node)}"]
    if node.step is not None:
        ended = node.step.outcome or "not decided, as far as it knew"
        lines.append(f"        its last step was {node.step.step}: {ended}")
    if node.last_event:
        lines.append(f"        its last event: {printable(node.last_event, 400)}")
    if node.left == "done":
        lines.append("        it had done its work and left")
    return lines


def _did(node: LastSeen) -> str:
    call = node.operation
    if call is None:
        return "called nothing that is known of"
    step = f" in step {call.step}" if call.step is not None else ""
    how = {"finished": "which ended well", "aborted": "which was given up"}.get(call.outcome, "which did not end")
    return f"last called {printable(call.name, 64)}{step} of view {call.view}, {how if node.own else 'as others know'}"


def _list(nodes: Sequence[str]) -> str:
    named = [printable(node, 64) for node in nodes[:_NAMED]]
    more = len(nodes) - len(named)
    if more:
        named.append(f"{more} more")
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}" if named else ""


def _time(found: PostMortem, at_ns: int) -> str:
    try:
        day = datetime.fromtimestamp((at_ns + found.wall_ns) / 1e9, UTC)
    except (OverflowError, ValueError, OSError):
        return "at an impossible time"
    return f"{day:%Y-%m-%d %H:%M:%S}.{day.microsecond // 1000:03d} UTC"
