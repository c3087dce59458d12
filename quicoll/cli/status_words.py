"""What a job's status means, in words: one sentence, a few lines, and a row for each node, the troubled ones first.

`quicoll status`, `quicoll top` and its page show the same words; how they look there is theirs. Links have rows of
their own (link_words.py). Everything said is in the words, never in a colour alone. Texts of nodes (why one left, what
an error said) are shown without characters that a terminal would obey.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from quicoll.cli.link_words import LinkRow, link_facts, link_rows, silent_members, untold_links
from quicoll.cli.quantity_words import duration_words, round_trip_words
from quicoll.membership.status import condition_of, is_late
from quicoll.observability.flight_record import printable

if TYPE_CHECKING:
    from quicoll.membership.status import JobStatus, MemberStatus
    from quicoll.membership.status_client import Glance

__all__ = ["Condition", "NodeRow", "Picture", "facts_of", "picture_of"]

Condition: TypeAlias = Literal["at work", "idle", "forming", "held", "stalled", "done", "unknown"]
"""As in quicoll.membership.status; "unknown" where no coordinator that leads has answered."""

_NAMED = 4
_STATES = {"outside": "not begun", "asked": "not answered", "confirmed": "agreed"}
"""Where the word of the message needs its explanation, another one."""
_TROUBLED = ("lost", "missing", "left out", "declined")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """A node as it is shown.

    Attributes:
        node: Its name.
        rank: In the view; "" where it is in none.
        state: How it is.
        step: The last step whose result it holds; "" where that is not known.
        rtt: The round trip between it and the coordinator.
        note: What else there is to say.
        troubled: Whether somebody should look at it.
    """

    node: str
    rank: str
    state: str
    step: str
    rtt: str
    note: str
    troubled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """All that is shown of a job.

    Attributes:
        job: Its name.
        condition: In one word.
        sentence: The same in one sentence, which stands for itself.
        lines: More of it, for people.
        rows: The nodes.
        unlisted: How many more nodes there are.
        links: Those between the ranks of the view, the worst first, where they were asked for.
        untold: How many more links there are that nothing is told of.
        unknown: Whose links are not known, in a sentence; "" where there is nobody.
        events: What has happened: how long ago, and what; the newest first.
    """

    job: str
    condition: Condition
    sentence: str
    lines: tuple[str, ...] = ()
    rows: tuple[NodeRow, ...] = ()
    unlisted: int = 0
    links: tuple[LinkRow, ...] = ()
    untold: int = 0
    unknown: str = ""
    events: tuple[tuple[str, str], ...] = ()

    @property
    def grade(self) -> Literal["good", "wait", "bad"]:
        """How it is to be coloured: at work with nodes that somebody should look at is not as good as without."""
        if self.condition == "done" or (self.condition == "at work" and not any(row.troubled for row in self.rows)):
            return "good"
        return "wait" if self.condition in ("at work", "idle", "forming") else "bad"

    @property
    def headline(self) -> str:
        """The sentence where the condition stands before it."""
        job, _, rest = self.sentence.partition(": ")
        return f"{job}: {rest.removeprefix(self.condition).lstrip(': ')}"

    @property
    def exit_status(self) -> int:
        """0 where it goes on, has ended or is about to go on, 1 where it is held or stalled, 2 where nobody knows."""
        return {"held": 1, "stalled": 1, "unknown": 2}.get(self.condition, 0)


def picture_of(glance: Glance, *, patience_ns: int | None = None, links: bool = False) -> Picture:
    """Return what is shown of a job.

    Args:
        glance: What was seen of it.
        patience_ns: As in `condition_of`.
        links: Whether what members say of their links was asked for.
    """
    status = glance.status
    if status is None:
        sentence = printable(f"job {glance.job}: nothing is known of it: {glance.trouble}")
        return Picture(job=glance.job, condition="unknown", sentence=sentence)
    condition = condition_of(status, patience_ns=patience_ns)
    rows = sorted((_row(status, each) for each in status.members), key=lambda row: not row.troubled)
    return Picture(
        job=glance.job,
        condition=condition,
        sentence=printable(f"job {glance.job}: {_sentence(status, condition)}"),
        lines=tuple(printable(line) for line in _lines(status, condition, glance.coordinator)),
        rows=tuple(rows),
        unlisted=status.unlisted,
        links=link_rows(status) if links else (),
        untold=untold_links(status) if links else 0,
        unknown=_unknown(status) if links else "",
        events=tuple((duration_words(each.ago_ns), printable(each.said)) for each in status.events),
    )


def facts_of(glance: Glance, *, patience_ns: int | None = None) -> dict[str, Any]:
    """Return the same for programs, as JSON takes it; durations in seconds.

    Args:
        glance: What was seen of the job.
        patience_ns: As in `condition_of`.
    """
    picture = picture_of(glance, patience_ns=patience_ns)
    status = glance.status
    return {
        "job": glance.job,
        "condition": picture.condition,
        "sentence": picture.sentence,
        "coordinator": glance.coordinator,
        "trouble": glance.trouble,
        "links": [] if status is None else link_facts(status),
        "untold_links": 0 if status is None else untold_links(status),
        "late": [] if status is None else [each.node for each in status.members if is_late(status, each)],
        "status": None if status is None else _in_seconds(status),
    }


def _in_seconds(value: Any) -> Any:
    """A message with all its fields, those in nanoseconds as seconds."""
    if isinstance(value, tuple):
        return [_in_seconds(each) for each in value]
    if not isinstance(value, msgspec.Struct):
        return value
    found: dict[str, Any] = {}
    for name, each in msgspec.structs.asdict(value).items():
        if name in ("links", "links_ns"):
            continue  # told by themselves, with the nodes at both ends: `link_facts`
        if name == "recent":
            found["recent_steps"], found["recent_s"] = each[0], each[1] / 1e9
        elif name.endswith("_ns"):
            found[f"{name.removesuffix('_ns')}_s"] = None if each is None else each / 1e9
        else:
            found[name] = _in_seconds(each)
    return found


def _sentence(status: JobStatus, condition: Condition) -> str:
    view = f"view {status.view_id} of {_ranks(status.world_size)}"
    match condition:
        case "done":
            return f"done at step {status.final_step}"
        case "held":
            return f"held for {duration_words(status.without_ns)}: {status.held}"
        case "forming":
            return f"forming: {status.held}" if status.held else f"forming a view{_unanswered(status)}"
        case "stalled":
            return f"stalled: {_why_stalled(status)}"
        case "idle":
            return f"idle: {view}, no step is open; {_last(status)}{_missed(status)}"
        case _:
            return (
                f"at work at step {status.committed_step}{_rate(status)}, {view}{_waited_for(status)}{_missed(status)}"
            )


def _lines(status: JobStatus, condition: Condition, coordinator: str) -> tuple[str, ...]:
    lease = f", lease {status.token}" if status.token else ""
    lines = [f"coordinator {coordinator} leads for {duration_words(status.led_ns)}{lease}"]
    if status.journal_ns >= 1_000_000_000:
        lines.append(f"its journal has not answered for {duration_words(status.journal_ns)}")
    if status.stage == "installed":
        lines.append(f"view {status.view_id}: {_ranks(status.world_size)} for {duration_words(status.stage_ns)}")
    elif status.stage == "proposed":
        lines.append(f"view {status.view_id} is proposed for {duration_words(status.stage_ns)}{_unanswered(status)}")
    elif not status.done:
        lines.append(f"no view for {duration_words(status.without_ns)}" + (f": {status.held}" if status.held else ""))
    lines.append(_last(status))
    if status.open_step:
        voted = f"{status.votes} of {_ranks(status.world_size)} voted"
        lines.append(
            f"step {status.open_step} is open for {duration_words(status.open_ns)}, {voted}{_waited_for(status)}"
        )
    if status.waiting_for:
        lines.append(f"asked for: {status.waiting_for}")
    if status.finished and condition != "done":
        lines.append(f"ended: {status.finished} of the last view, at step {status.final_step}")
    return tuple(lines)


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _last(status: JobStatus) -> str:
    if not status.committed_step:
        return "no step was committed yet"
    if status.committed_ns is None:
        return f"step {status.committed_step} was committed before this coordinator began"
    return f"step {status.committed_step} was committed {duration_words(status.committed_ns)} ago"


def _rate(status: JobStatus) -> str:
    steps, nanoseconds = status.recent
    if not steps or not nanoseconds:
        return ""
    rate = steps / (nanoseconds / 1e9)
    return f" ({rate:.3g} steps/s)" if rate >= 0.1 else f" (one in {duration_words(nanoseconds // steps)})"


def _names(nodes: list[str]) -> str:
    more = len(nodes) - _NAMED
    return ", ".join(nodes[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _late(status: JobStatus) -> str:
    """Who is waited for and why, "" where nobody is."""
    late = [each for each in status.members if is_late(status, each)]
    parts = []
    for state, what in (("outside", "not begun"), ("computing", "not voted")):
        nodes = [each.node for each in late if each.state == state]
        if nodes:
            parts.append(f"{_names(nodes)} {'have' if len(nodes) > 1 else 'has'} {what}")
    return ", ".join(parts)


def _waited_for(status: JobStatus) -> str:
    parts = [f"; {late}"] if (late := _late(status)) else []
    doubted = [f"{each.node} ({duration_words(each.silent_ns or 0)})" for each in status.members if each.doubted]
    return "".join(parts) + (f"; silent: {_names(doubted)}" if doubted else "")


def _missed(status: JobStatus) -> str:
    parts = []
    for state in ("lost", "missing", "left out"):
        nodes = [_since(each) for each in status.members if each.state == state]
        parts += [f"; {state}: {_names(nodes)}"] if nodes else []
    return "".join(parts)


def _since(member: MemberStatus) -> str:
    if member.state == "lost" and member.for_ns is not None:
        return f"{member.node} ({duration_words(member.for_ns)} ago)"
    return member.node


def _unknown(status: JobStatus) -> str:
    nodes = silent_members(status)
    return printable(f"not known: the links of {_names(nodes)}") if nodes else ""


def _unanswered(status: JobStatus) -> str:
    nodes = [each.node for each in status.members if each.state == "asked"]
    return f"; not answered: {_names(nodes)}" if nodes else ""


def _why_stalled(status: JobStatus) -> str:
    if status.stage == "installed" and status.open_step:
        late = _late(status) or "nobody has voted" * (status.votes == 0)
        who = f"; {late}" if late else ""
        silent = _waited_for(status).removeprefix(f"; {late}") if late else _waited_for(status)
        return (
            f"step {status.open_step} has been open for {duration_words(status.open_ns)}{who}{silent}{_missed(status)}"
        )
    if status.journal_ns and status.stage == "installed":
        return f"the journal has not answered for {duration_words(status.journal_ns)}"
    return f"no view for {duration_words(status.without_ns)}{_unanswered(status)}{_missed(status)}"


def _row(status: JobStatus, member: MemberStatus) -> NodeRow:
    late = is_late(status, member)
    notes = []
    if late:
        notes.append("the others wait for it")
    if member.doubted:
        notes.append(f"silent for {duration_words(member.silent_ns or 0)}")
    if member.state in ("lost", "gone") and member.for_ns is not None:
        notes.append(f"{duration_words(member.for_ns)} ago: {_plain_cause(member)}")
    elif member.state == "missing":
        notes.append("of the last view; not heard since this coordinator began")
    elif member.state == "left out" and member.out_ns:
        notes.append(f"for {duration_words(member.out_ns)} more: {member.why}")
    elif member.why:
        notes.append(member.why)
    if member.resends:
        notes.append(f"{member.resends} sent again")
    here = member.state not in ("lost", "missing", "gone") and member.for_ns is not None
    return NodeRow(
        node=printable(member.node),
        rank="" if member.rank is None else str(member.rank),
        state=_STATES.get(member.state, member.state),
        step=str(member.step) if here and member.state != "done" else "",
        rtt="" if member.rtt_ns is None else round_trip_words(member.rtt_ns),
        note=printable("; ".join(notes)),
        troubled=late or member.doubted or member.state in _TROUBLED,
    )


def _plain_cause(member: MemberStatus) -> str:
    """Why it went, without its name where the cause begins with it: the name stands beside it."""
    return member.why.removeprefix(f"{member.node} was lost: ").removeprefix(f"{member.node} ")
