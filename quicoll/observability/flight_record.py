"""The file of a flight recorder: what one process did last, as lines of JSON; bounded, written whole, read with care.

    first line     `FlightHeader`: who wrote it, when, why, and what its clock is
    then           what was kept, in the order of its kinds: operations, steps, events, stacks, views, and how those
                   broke; of a supervisor the processes that ended
    last line      `FlightFoot`: how many lines stand before it. Without it the file is torn

Times are nanoseconds of the writer's monotonic clock, `clock` says which one that is: processes whose files name the
same one share it. The header has one moment of it by the wall as well.

Whoever reads a file takes nothing of it for granted. It may be torn, of another program, or made to do harm. So its
size, its lines and every text and number have bounds; lines that are no records are counted and left out; what stands
in texts is printed without control characters (`printable`). A node's name is not believed beyond its own file.

Nothing secret is written: names of nodes and operations, shapes, numbers, causes as errors have them. No tensor, no
key, no line of a program's output, no variable.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias

import msgspec

from quicoll.checks import MAX_MEMBERS

__all__ = [
    "FLIGHT_FORMAT",
    "MAX_FILE",
    "MAX_STACK",
    "AwaitedCall",
    "BrokenView",
    "FlightEvent",
    "FlightFile",
    "FlightFoot",
    "FlightHeader",
    "FlightOperation",
    "FlightRecord",
    "FlightStep",
    "FlightView",
    "LateStack",
    "ProcessEnd",
    "decode_flight",
    "encode_flight",
    "encode_record",
    "printable",
]

FLIGHT_FORMAT = "quicoll-flight-1"
MAX_FILE = 8 << 20
"""Bytes of a file that are written, or read."""
MAX_STACK = 16 << 10
"""Characters of the stacks of one process."""
_MAX_LINES = 8192

_Name = Annotated[str, msgspec.Meta(max_length=256)]
_Text = Annotated[str, msgspec.Meta(max_length=2048)]
_Stack = Annotated[str, msgspec.Meta(max_length=MAX_STACK)]
_Number = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=(1 << 62))]
_Nodes = Annotated[tuple[_Name, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
_Heard = Annotated[dict[_Name, _Number], msgspec.Meta(max_length=MAX_MEMBERS)]


class _Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    pass


class FlightHeader(_Record, frozen=True, kw_only=True, tag="flight"):
    """Who wrote the file. role: "rank" or "supervisor". t, wall: one moment by both clocks. why: what it was written
    for last. left: why the process ended, as it said itself; "" where it has not."""

    format: _Name
    role: _Name
    job: _Name
    node: _Name
    process: _Name
    clock: _Name
    host: _Name
    t: _Number
    wall: _Number
    why: _Text
    left: _Text = ""
    world_size: _Number = 0


class FlightOperation(_Record, frozen=True, kw_only=True, tag="operation"):
    """An operation that this rank called. called, settled, ended: when; 0: not by the time of writing. settled: when
    all had called, where that is known. outcome: "finished", "aborted", or "" for one that was under way, or whose
    view ended. heard: by node, when its call came to be known here, where the operation went over the network. given:
    bytes that this rank gives, as far as that is known."""

    view: _Number
    name: _Name
    what: _Text
    step: _Number | None = None
    carrier: _Name = ""
    algorithm: _Name = ""
    called: _Number = 0
    settled: _Number = 0
    ended: _Number = 0
    outcome: _Name = ""
    heard: _Heard = {}
    given: _Number = 0


class FlightView(_Record, frozen=True, kw_only=True, tag="view"):
    """A view that was installed here. mark: the same in all processes that were in it, and in no other view, not even
    one of this number in another run of the job. nodes: its members, by rank."""

    t: _Number
    view: _Number
    mark: _Name
    nodes: _Nodes


class FlightStep(_Record, frozen=True, kw_only=True, tag="step"):
    """A step that this rank began, and what became of it: "committed", "aborted", or "" where that is not known."""

    step: _Number
    view: _Number
    began: _Number
    ended: _Number = 0
    outcome: _Name = ""


class FlightEvent(_Record, frozen=True, kw_only=True, tag="event"):
    """An event of this rank, in a sentence; what is concluded from it has fields of its own."""

    t: _Number
    what: _Name
    text: _Text
    view: _Number = 0
    node: _Name = ""
    nodes: _Nodes = ()


class AwaitedCall(_Record, frozen=True, kw_only=True, tag="awaited"):
    """An operation that was under way, and the nodes whose call of it had not come. instead: what those had called."""

    name: _Name
    what: _Text
    step: _Number | None = None
    called: _Number = 0
    absent: _Nodes = ()
    instead: Annotated[dict[_Name, _Text], msgspec.Meta(max_length=MAX_MEMBERS)] = {}


class BrokenView(_Record, frozen=True, kw_only=True, tag="broken"):
    """How a view ended on this rank. seen: by what was found here, before the coordinator had said anything; else it is
    what the coordinator told. error: the class. node, lost: whom the error names."""

    t: _Number
    view: _Number
    seen: bool
    error: _Name
    text: _Text
    node: _Name = ""
    lost: _Nodes = ()
    awaited: Annotated[tuple[AwaitedCall, ...], msgspec.Meta(max_length=64)] = ()


class LateStack(_Record, frozen=True, kw_only=True, tag="stack"):
    """Where the threads of a late node were, by its own answer; or why there is none."""

    t: _Number
    node: _Name
    text: _Stack


class ProcessEnd(_Record, frozen=True, kw_only=True, tag="process_end"):
    """Of a supervisor: a process of a node has ended. status: as of `Popen.returncode`."""

    t: _Number
    node: _Name
    process: _Name
    status: Annotated[int, msgspec.Meta(ge=-(1 << 31), le=1 << 31)]
    text: _Text


class FlightFoot(_Record, frozen=True, kw_only=True, tag="end"):
    """The last line."""

    lines: _Number


FlightRecord: TypeAlias = FlightView | FlightOperation | FlightStep | FlightEvent | BrokenView | LateStack | ProcessEnd
_Line: TypeAlias = FlightHeader | FlightRecord | FlightFoot

_encoder = msgspec.json.Encoder(order="deterministic")
_decoder: msgspec.json.Decoder[_Line] = msgspec.json.Decoder(_Line)


class FlightFile(msgspec.Struct, frozen=True, kw_only=True):
    """What one file says. trouble: what is wrong with it, a sentence each; it is of use all the same."""

    header: FlightHeader
    records: tuple[FlightRecord, ...]
    trouble: tuple[str, ...] = ()

    def of(self, kind: type[Any]) -> list[Any]:
        """Return the records of a kind, in their order."""
        return [record for record in self.records if isinstance(record, kind)]


def encode_record(record: FlightHeader | FlightRecord | FlightFoot) -> bytes:
    """Return a line without its end."""
    return _encoder.encode(record)


def encode_flight(file: FlightFile) -> bytes:
    """Return the bytes of a file, at most MAX_FILE of them: of too much the first records, which are older, go."""
    lines = [_encoder.encode(record) for record in file.records]
    head = _encoder.encode(file.header)
    room = MAX_FILE - len(head) - 256
    kept: list[bytes] = []
    for line in reversed(lines[-(_MAX_LINES - 2) :]):
        room -= len(line) + 1
        if room < 0:
            break
        kept.append(line)
    kept.reverse()
    foot = _encoder.encode(FlightFoot(lines=len(kept) + 1))
    return b"\n".join([head, *kept, foot, b""])


def decode_flight(data: bytes, *, most: int = MAX_FILE, most_lines: int = _MAX_LINES) -> FlightFile | str:
    """Read the bytes of a file.

    Args:
        data: All of them.
        most: How many there may be.
        most_lines: How many lines are read.
    Returns:
        What it says, or in a sentence why it says nothing.
    """
    if len(data) > most:
        return f"it is larger than the {most >> 20} MiB that a recorder writes"
    lines = data.split(b"\n", most_lines)
    header = _decoded(lines[0])
    if not isinstance(header, FlightHeader):
        return "it does not begin as the file of a flight recorder does"
    if header.format != FLIGHT_FORMAT:
        return f"its format is {printable(header.format)!r}, and what is read here is {FLIGHT_FORMAT!r}"
    records: list[FlightRecord] = []
    bad = 0
    foot: FlightFoot | None = None
    for line in lines[1:]:
        if not line:
            continue
        found = _decoded(line) if foot is None else None
        if isinstance(found, FlightFoot):
            foot = found
        elif found is None or isinstance(found, FlightHeader):
            bad += 1
        else:
            records.append(found)
    trouble: list[str] = []
    if bad:
        trouble.append(f"{bad} of its lines are no records and are left out")
    if foot is None:
        trouble.append("it is torn: its end is missing")
    elif foot.lines != len(records) + 1:
        trouble.append(f"it has {len(records)} records, and should have {foot.lines - 1}")
    return FlightFile(header=header, records=tuple(records), trouble=tuple(trouble))


def _decoded(line: bytes) -> _Line | None:
    try:
        return _decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def printable(text: str, most: int = 2048) -> str:
    """Return text for a terminal: without control characters, which could do more than be read; cut to a length."""
    clean = "".join(each if each.isprintable() else " " for each in text[: most + 1])
    return clean if len(clean) <= most else f"{clean[: most - 3]}..."
