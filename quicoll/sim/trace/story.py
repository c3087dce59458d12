"""A run as a story: seconds, who, what happened and why; grouped, and without what follows from what was said.

What is told, and what not:

    faults              each, with the time until which it lasts, or that it could not be done
    views               formed, ended, proposed and never installed, as the coordinator says
    steps               commits in a row of one view as one line; each abort with its cause
    ranks               what a rank says beyond the coordinator: peers it lost, why it holds, state it was given, a
                        decision that it hears of late; ranks that say the same within `_TOGETHER_NS` share a line
    processes           started again, ended and how
    datagrams           not one; their troubles are summed up at the end

The verdict comes last. Where an invariant broke, what led to it follows: the faults in force at that moment, and the
last entries of the trace, those of the node concerned if there is one, in full.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quicoll.sim.scenario.events import COORDINATOR_HOST, Crash, Heal, Pause, is_coordinator
from quicoll.sim.trace.spans import Entry, fault_spans

if TYPE_CHECKING:
    from quicoll.sim.outcome import Outcome

__all__ = ["list_nodes", "tell"]

_TOGETHER_NS = 50_000_000
_LATE_NS = 100_000_000  # after the decision, from which a rank that hears of it only now is worth a line
_LEFT = "this node left"  # a rank's own word when it is done; that it returned says it all
_LAST = 12  # entries before the end of a run that failed


def list_nodes(nodes: Iterable[str]) -> str:
    """Nodes for people: "the coordinator and workers 0-2 and 5"."""
    numbers: dict[int, None] = {}
    others: dict[str, None] = {}
    for node in nodes:
        prefix, _, number = node.partition("-")
        if prefix == "worker" and number.isdigit():
            numbers[int(number)] = None
        else:
            others["the coordinator" if node == COORDINATOR_HOST else node] = None
    parts = list(others)
    if numbers:
        parts.append(f"worker{'s' if len(numbers) > 1 else ''} {_ranges(sorted(numbers))}")
    return " and ".join(parts) or "nobody"


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts: list[str] = []
    for run in runs:
        texts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    return ", ".join(texts[:-1]) + " and " + texts[-1] if len(texts) > 1 else texts[0]


@dataclass(slots=True)
class _Line:
    """text: with {who} where the nodes go."""

    t_ns: int
    text: str
    nodes: dict[str, None] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.t_ns / 1e9:9.3f} s  {self.text.replace('{who}', list_nodes(self.nodes))}"


def tell(entries: list[Entry], outcome: Outcome, of: str = "") -> str:
    """The whole story, with its verdict, as lines of text. of: which run this is, where there are several of a seed."""
    told = _Story(entries)
    which = f"Seed {outcome.seed}, {of}" if of else f"Seed {outcome.seed}"
    lines = [f"{which}: what happened, in seconds of simulated time.", ""]
    lines += [str(line) for line in sorted(told.lines, key=lambda line: line.t_ns)]
    lines += ["", *_verdict(outcome)]
    if outcome.error is not None:
        lines += ["", *_what_led_to_it(entries, outcome)]
    return "\n".join(lines) + "\n"


class _Story:
    def __init__(self, entries: list[Entry]) -> None:
        self.lines: list[_Line] = []
        self._groups: dict[tuple[object, ...], _Line] = {}
        self._lasting = {id(span.cause): span for span in fault_spans(entries)}
        self._void = {id(entry.what) for entry in entries if entry.kind == "fault_void"}
        self._starts = {
            node: [
                entry.t_ns for entry in entries if entry.kind == "host" and entry.who == node and entry.what == "start"
            ]
            for node in {entry.who: None for entry in entries}
        }
        self._resumes = [entry for entry in entries if entry.kind == "host" and entry.what in ("resume", "kill")]
        self._said: dict[tuple[object, ...], None] = {}  # by the coordinator: what ranks need not repeat
        for entry in entries:
            if is_coordinator(entry.who) and entry.kind in ("view_ended", "step_aborted", "held"):
                self._said[_key(entry)] = None
        # Both count in a view, since the coordinator numbers its decisions, and ranks the steps of their state.
        self._decided: dict[object, list[int]] = {}  # when, by view
        self._heard: dict[tuple[str, object], int] = {}  # how many, by rank and view
        self._proposed: tuple[int, object, list[str]] | None = None
        self._commits: tuple[_Line, int, int, object] | None = None  # line, first and last step, view
        self._waiting: _Line | None = None
        self._views = 0
        for entry in entries:
            self._take(entry)
        self._not_installed()

    def _take(self, entry: Entry) -> None:
        if entry.kind in ("fault", "host", "process_ended", "checkpoint_chosen"):
            getattr(self, f"_{entry.kind}")(entry)
        elif is_coordinator(entry.who):
            self._coordinator(entry)
        else:
            self._rank(entry)

    def _say(self, t_ns: int, text: str) -> None:
        self._commits = None
        self.lines.append(_Line(t_ns, text))

    def _together(self, entry: Entry, text: str, *key: object) -> None:
        """A line that several nodes share, if they come to it within a moment."""
        line = self._groups.get((entry.kind, *key))
        if line is None or entry.t_ns - line.t_ns > _TOGETHER_NS:
            self._commits = None
            line = self._groups[entry.kind, *key] = _Line(entry.t_ns, text)
            self.lines.append(line)
        line.nodes[entry.who] = None

    # -- faults and processes ------------------------------------------------------------------------------------

    def _fault(self, entry: Entry) -> None:
        fault = entry.what
        text = f"FAULT  {fault.source()}"
        span = self._lasting.get(id(entry))
        if id(fault) in self._void:
            text += ": nothing is done, the process is not there or not in such a state"
        elif span is not None:
            text += "; to the end" if span.end_ns is None else f"; until {span.end_ns / 1e9:.3f} s ({span.ended_by})"
        elif isinstance(fault, Crash):
            again = next((t_ns for t_ns in self._starts.get(fault.node, ()) if t_ns > entry.t_ns), None)
            text += "; for good" if again is None else f"; down until {again / 1e9:.3f} s"
        elif isinstance(fault, Pause):
            after = [each for each in self._resumes if each.who == fault.node and each.t_ns >= entry.t_ns]
            text += "; to the end" if not after else f"; until {after[0].t_ns / 1e9:.3f} s"
        elif isinstance(fault, Heal):
            text += ": all is well from here on"
        self._say(entry.t_ns, text)

    def _host(self, entry: Entry) -> None:
        if entry.what == "start":
            again = self._starts[entry.who][0] != entry.t_ns
            self._together(entry, "{who} " + ("started again" if again else "started"), again)

    def _process_ended(self, entry: Entry) -> None:
        if entry.what == "well":
            self._together(entry, "{who} returned, done", "well")
        else:
            self._together(entry, "{who} ended by " + str(entry.what), entry.what)

    def _checkpoint_chosen(self, entry: Entry) -> None:
        self._say(entry.t_ns, f"a person left the checkpoint of {list_nodes([entry.who])} {entry.what} alone")

    # -- the coordinator -----------------------------------------------------------------------------------------

    def _coordinator(self, entry: Entry) -> None:
        t_ns, cause = entry.t_ns, entry.field("cause", "")
        match entry.kind:
            case "leads":
                self._say(t_ns, f"{list_nodes([entry.who])} leads, by the lease with token {entry.field('token')}")
            case "node_joined" if self._views:
                self._say(t_ns, f"{list_nodes([entry.field('peer')])} came back to the coordinator")
            case "peer_lost" if not entry.field("left"):
                self._say(t_ns, f"the coordinator lost {list_nodes([entry.field('peer')])}: {cause}")
            case "view_proposed":
                self._not_installed()
                self._proposed = t_ns, entry.field("view"), entry.field("nodes")
            case "view_installed":
                self._proposed = None
                self._views += 1
                nodes = entry.field("nodes")
                self._say(t_ns, f"view {entry.field('view')} formed of {list_nodes(nodes)}, {len(nodes)} ranks")
            case "view_ended":
                self._say(t_ns, f"view {entry.field('view')} ended: {cause}")
            case "step_committed":
                self._committed(entry)
            case "step_aborted":
                self._say(t_ns, f"step {entry.field('step')} was not committed: {cause}")
            case "held":
                self._waits(t_ns, f"the coordinator waits: {cause}")

    def _waits(self, t_ns: int, text: str) -> None:
        """While nodes come one by one, only the last word of a moment counts."""
        if self._waiting is not None and t_ns - self._waiting.t_ns <= _TOGETHER_NS:
            self._waiting.text = text
        else:
            self._say(t_ns, text)
            self._waiting = self.lines[-1]

    def _not_installed(self) -> None:
        if self._proposed is not None:
            t_ns, view, nodes = self._proposed
            self._say(t_ns, f"view {view} was proposed to {list_nodes(nodes)}, and never installed")
            self._proposed = None

    def _committed(self, entry: Entry) -> None:
        step, view = entry.field("step"), entry.field("view")
        self._decided.setdefault(view, []).append(entry.t_ns)
        if self._commits is not None and self._commits[3] == view and self._commits[2] == step - 1:
            line, first, _, _ = self._commits
            line.text = f"steps {first} to {step} committed, until {entry.t_ns / 1e9:.3f} s"
            self._commits = line, first, step, view
        else:
            line = _Line(entry.t_ns, f"step {step} committed")
            self.lines.append(line)
            self._commits = line, step, step, view

    # -- ranks ---------------------------------------------------------------------------------------------------

    def _rank(self, entry: Entry) -> None:
        cause, step = entry.field("cause", ""), entry.field("step")
        match entry.kind:
            case "peer_lost":
                lost = list_nodes([entry.field("peer")])
                self._together(entry, f"{{who}} lost {lost}: {cause}", lost, cause)
            case "view_ended" if _key(entry) not in self._said and cause != _LEFT:
                text = f"view {entry.field('view')} ended for {{who}}: {cause}"
                self._together(entry, text, entry.field("view"), cause)
            case "step_aborted" if _key(entry) not in self._said:
                self._together(entry, f"step {step} was not committed on {{who}}: {cause}", step, cause)
            case "step_committed":
                self._decision_heard(entry)
            case "held" if _key(entry) not in self._said:
                self._together(entry, f"{{who}} held: {cause}", cause)
            case "state_received":
                giver = entry.field("from_rank")
                self._together(entry, f"{{who}} got the state after step {step} from rank {giver}", giver, step)
            case "state_handed" | "state_differs":
                differing, giver = list_nodes(entry.field("nodes")), entry.field("from_node")
                text = (
                    f"{{who}} saw that the state of {differing} after step {step} differs in {entry.field('tensor')!r}"
                )
                self._together(entry, f"{text}; {giver} gives its own" if giver else text, differing, step)
            case "state_torn":
                self._together(entry, f"{{who}} has half a state: {cause}", cause)
            case "state_learning":
                self._together(entry, f"{{who}} began to learn the state from {entry.field('from_node')}", entry.t_ns)
            case "state_learned":
                text = f"{{who}} has learned {entry.field('chunks')} chunks of the state"
                self._together(entry, f"{text}, and no more: {cause}" if cause else text, entry.t_ns)
            case "standing_by":
                self._together(entry, "{who} stands by as a warm spare", entry.t_ns)
            case "refused":
                self._together(entry, f"{{who}} was refused: {entry.field('reason')}", entry.field("reason"))

    def _decision_heard(self, entry: Entry) -> None:
        """Tell of it where that is late."""
        step, view = entry.field("step"), entry.field("view")
        times, heard = self._decided.get(view, []), self._heard.get((entry.who, view), 0)
        self._heard[entry.who, view] = heard + 1
        late_ns = entry.t_ns - times[heard] if heard < len(times) else 0
        if late_ns > _LATE_NS:
            text = f"{{who}} heard only now, {late_ns / 1e9:.1f} s late, that step {step} is committed"
            self._together(entry, text, step)


def _key(entry: Entry) -> tuple[object, ...]:
    if entry.kind == "step_aborted":
        return entry.kind, entry.field("step"), entry.field("view")
    if entry.kind == "held":
        return entry.kind, entry.field("cause")
    return entry.kind, entry.field("view"), entry.field("cause")


# -- the end -------------------------------------------------------------------------------------------------------


def _verdict(outcome: Outcome) -> list[str]:
    troubles = [
        f"{count} {kind.removeprefix('datagram_')}" for kind, count in outcome.injected.items() if "datagram_" in kind
    ]
    lines = [f"Datagrams in trouble: {', '.join(troubles) or 'none'}."]
    counts = f"{outcome.committed} steps committed, {outcome.aborted} aborted, {outcome.views} views"
    lines.append(f"{counts}; {outcome.virtual_s:.3f} s simulated in {outcome.wall_s:.2f} s.")
    if outcome.error is None:
        lines.append("VERDICT  all is well: every invariant held.")
    else:
        lines.append(f"VERDICT  FAILED  {outcome.error}")
    return lines


def _what_led_to_it(entries: list[Entry], outcome: Outcome) -> list[str]:
    error = outcome.error
    if error is None:
        return []
    at_ns = round(error.at * 1e9)
    lines = ["What led to it"]
    in_force = [span for span in fault_spans(entries) if span.covers(at_ns)]
    lines += [f"  in force: {span.name}, since {span.start_ns / 1e9:.3f} s" for span in in_force]
    past = [entry for entry in entries if entry.t_ns <= at_ns and entry.kind != "send"]
    concerned = [entry for entry in past if entry.who == error.node or entry.kind == "fault"] if error.node else past
    lines += [f"  {entry}" for entry in concerned[-_LAST:]]
    return lines
