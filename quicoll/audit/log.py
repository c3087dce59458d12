"""Digests of the inputs and the result of every collective, so that two runs can be compared without their tensors.

Each rank writes one file, one line for each collective that succeeded, and one for the beginning of each step.
`quicoll.audit.diff` compares what `load_run` makes of them.

What a run did is what its last attempts did. An attempt at a step that was given up is superseded by the next: in a
file by later lines, between files by the higher view, for every attempt in a higher view comes after all in lower ones.
So of a step only the ranks of its highest view count; a rank that was lost in an attempt and has no part in the next
does not. Calls outside of steps stand after the step that was before them; those of a rank that has only just come, or
come back, after the step before the one that it begins next, which is where the other ranks have them.

What is not there is said. Each line of a beginning tells the size of the world, so a rank without a file is known to be
missing; a file may be damaged (below); a directory may hold files of another job or of two runs, which is refused.

The file. Lines of text: 16 hexadecimal digits, a space, one JSON object, a newline. The digits are XXH3-64 of the
digits of the line before (of nothing, in the first) and of the JSON text, so that a line is good only if all before it
are. The first object names format, job and node. Each line is one write, so a process that is killed leaves whole lines
and at most one half; a machine that loses power may leave less. Readers take the lines up to the first that is not
good, and say that there was one. A writer that finds a file goes on after its last good line.

There are no times in it: the files of two equal runs are equal. These digits find accidents. Against a person there are
signatures in a file beside it (`quicoll.audit.seal`), which say the times as well.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import xxhash

from quicoll.audit.appending import append_line
from quicoll.errors import AuditError, LocalError

if TYPE_CHECKING:
    from quicoll.audit.seal import Sealer

__all__ = [
    "Attempt",
    "AuditLog",
    "OperationRecord",
    "Run",
    "RunPosition",
    "StepBegun",
    "audit_file",
    "load_run",
    "read_log",
]

SUFFIX = ".audit"
_FORMAT = "quicoll-audit-1"


class _Header(msgspec.Struct, frozen=True, kw_only=True, tag="header", tag_field="kind"):
    format: str
    job: str
    node: str


class StepBegun(msgspec.Struct, frozen=True, kw_only=True, tag="begin", tag_field="kind"):
    """The line of a step that begins: earlier lines of this step and of later ones belong to aborted attempts."""

    step: int
    view: int
    rank: int
    world: int


class OperationRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="op", tag_field="kind"):
    """One collective that succeeded on this rank.

    step: the open step's number, None outside of one. group, seq: which group, and the number of the collective in it
    (of send and recv: among those from one rank to another). op: what was called, without what may differ between
    equal runs (world size, algorithm, chunks), for instance "all_reduce float32 (3,5) sum default". inputs: number of
    each leaf passed on this rank (its rank where there are no leaves) and the digest of its elements. result: digest,
    "" where this rank got nothing. agreed: whether the result has to be equal on all ranks. Digests are hexadecimal,
    xxh3-128 of the elements in C order.
    terms: what else this rank asked for that decides results and is another at another world size, for instance
    "counts=3,1" or "color=0 key=2"; a result with terms means nothing beside one of another world size. members: how
    many ranks took part, if not all of the view.
    """

    view: int
    step: int | None
    rank: int
    world: int
    group: str
    seq: int
    op: str
    inputs: tuple[tuple[int, str], ...]
    result: str
    agreed: bool
    terms: str = ""
    members: int = 0

    @property
    def size(self) -> int:
        """The number of ranks that took part."""
        return self.members or self.world

    @property
    def between(self) -> str:
        """Of send and recv: from which rank to which; "" of others."""
        return self.op.partition(" from ")[2]


_Line = _Header | StepBegun | OperationRecord
_encoder = msgspec.json.Encoder(order="deterministic")
_decoder: msgspec.json.Decoder[_Line] = msgspec.json.Decoder(_Line)


# ---------------------------------------------------------------------------------------------------------------------
# Writing and reading one file


class AuditLog:
    """Writes the file of one rank. Every method raises AuditError where the file cannot be written.

    Args:
        path: The file; its directory is made. `load_run` looks for `directory / (node + ".audit")`. A file of the same
            job and node is continued; any other is refused.
        job: The job's name.
        node: The rank's name.
        sealer: Signs it; None leaves it unsigned.
    """

    def __init__(self, path: str | Path, *, job: str, node: str, sealer: Sealer | None = None) -> None:
        self._path = Path(path)
        self._sealer = sealer
        self._lines = 0
        self._hash = hashlib.sha256()
        header = _Header(format=_FORMAT, job=job, node=node)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self._chain = self._resume(header)
                if sealer is not None:
                    sealer.open(lines=self._lines, digest=self._hash.hexdigest())
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as error:
            raise AuditError(f"cannot be written: {error.strerror or error}", path=str(self._path)) from error

    def begin(self, *, step: int, view: int, rank: int, world: int) -> None:
        """Note that a step begins, or begins again."""
        if self._sealer is not None:
            self._sealer.begins(step, view, lines=self._lines, digest=self._hash.hexdigest())
        self._append(StepBegun(step=step, view=view, rank=rank, world=world))

    def record(self, record: OperationRecord) -> None:
        """Note a collective, after it has succeeded."""
        self._append(record)

    def resumed(self, step: int, source: str) -> None:
        """Note, where it is signed, that the state is now the one after `step`, read from `source`."""
        if self._sealer is not None:
            self._sealer.resumed(step, source, lines=self._lines, digest=self._hash.hexdigest())

    def close(self) -> None:
        """Close the file, and sign the whole. Raises AuditError where that cannot be; it is closed all the same."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            if self._sealer is not None:
                self._sealer.end(lines=self._lines, digest=self._hash.hexdigest())

    def _resume(self, header: _Header) -> str:
        with open(self._fd, "rb", closefd=False) as file:
            data = file.read()
        lines = list(_good_lines(data))
        end = lines[-1].end if lines else 0
        if lines and lines[0].content != header:
            raise AuditError(f"it is the audit of another: {lines[0].content}", path=str(self._path))
        os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)
        if not lines:
            self._chain = ""
            self._append(header)
            return self._chain
        self._lines = len(lines)
        self._hash.update(data[:end])
        return lines[-1].digits

    def _append(self, content: _Line) -> None:
        if self._fd < 0:
            raise AuditError("it is closed", path=str(self._path))
        text = _encoder.encode(content)
        digits = _digits(self._chain, text)
        line = digits.encode() + b" " + text + b"\n"
        append_line(self._fd, line, self._path)
        self._chain = digits
        self._lines += 1
        self._hash.update(line)


@dataclass(frozen=True, slots=True)
class _Good:
    digits: str
    content: _Line
    end: int


def _digits(chain: str, text: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(chain.encode() + text)


def _good_lines(data: bytes) -> Iterator[_Good]:
    chain, start = "", 0
    while (stop := data.find(b"\n", start)) >= 0:
        digits, text = data[start : start + 16], data[start + 17 : stop]
        if data[start + 16 : start + 17] != b" " or digits != _digits(chain, text).encode():
            return
        try:
            content = _decoder.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError):  # of a later format, say
            return
        chain, start = digits.decode(), stop + 1
        yield _Good(chain, content, start)


@dataclass(frozen=True, slots=True)
class Log:
    """One file as read.

    Attributes:
        job: The job's name.
        node: The rank's name.
        lines: In order, without the header.
        whole: Whether the last line was good.
    """

    job: str
    node: str
    lines: tuple[StepBegun | OperationRecord, ...]
    whole: bool


def read_log(path: str | Path) -> Log:
    """Read one file, up to the first line that is not good.

    Args:
        path: The file.
    Returns:
        Its lines.
    Raises:
        AuditError: It cannot be read, or no good header stands at its head.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise AuditError(f"cannot be read: {error.strerror or error}", path=str(path)) from error
    good = list(_good_lines(data))
    header = good[0].content if good else None
    if not isinstance(header, _Header) or header.format != _FORMAT:
        raise AuditError(f"it is no audit of this version: it should begin with {_FORMAT}", path=str(path))
    lines = [line.content for line in good[1:]]
    kept = tuple(line for line in lines if not isinstance(line, _Header))
    return Log(header.job, header.node, kept, good[-1].end == len(data))


# ---------------------------------------------------------------------------------------------------------------------
# A run


@dataclass(frozen=True, order=True, slots=True)
class RunPosition:
    """A place in a run: in a step, or outside after it (step 0: before all)."""

    step: int
    outside: bool

    def __str__(self) -> str:
        return f"after step {self.step}, outside of any" if self.outside else f"step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The attempt at a place that counts.

    Attributes:
        view: The view's number.
        world: Number of ranks.
        ranks: What each did, in order.
        cut: Those of them whose file is damaged here, so that they may have done more.
    """

    view: int
    world: int
    ranks: dict[int, list[OperationRecord]]
    cut: tuple[int, ...] = ()

    @property
    def missing(self) -> list[int]:
        """Ranks without any record here, where other ranks have records."""
        return [rank for rank in range(self.world) if rank not in self.ranks] if any(self.ranks.values()) else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run, or what is there of it.

    Attributes:
        name: Its path.
        places: What was done, by place.
        gaps: What is missing, in words.
        alone: Whether it is one file that was asked for by itself, so that other ranks are not missing.
        damaged: Whether all of its files are damaged, so that it may have gone on.
    """

    name: str
    places: dict[RunPosition, Attempt]
    gaps: tuple[str, ...] = ()
    alone: bool = False
    damaged: bool = False

    @property
    def operations(self) -> int:
        return sum(len(records) for attempt in self.places.values() for records in attempt.ranks.values())


@dataclass(frozen=True, slots=True)
class _Part:
    """The records of one file for a place."""

    file: str
    view: int
    world: int
    rank: int
    records: list[OperationRecord]
    cut: bool


def load_run(path: str | Path) -> Run:
    """Read a run.

    Args:
        path: A file, or a directory with one file for each rank.
    Returns:
        The run.
    Raises:
        AuditError: There is none, a file cannot be read, or the files are of several jobs or runs.
    """
    path = Path(path)
    alone = not path.is_dir()
    files = [path] if alone else sorted(path.glob(f"*{SUFFIX}"))
    if not files:
        raise AuditError(f"there is no *{SUFFIX} in it", path=str(path))
    logs = {file.name: read_log(file) for file in files}
    owners: dict[str, str] = {}
    for name, log in logs.items():
        first = next(iter(logs.values()))
        if log.job != first.job:
            raise AuditError(f"it has files of several jobs, {first.job} and {log.job}", path=str(path))
        if owners.setdefault(log.node, name) != name:
            raise AuditError(f"{owners[log.node]} and {name} are both of node {log.node}", path=str(path))
    gaps = [
        f"{name} is good up to its line {len(log.lines) + 1} and not after"
        for name, log in logs.items()
        if not log.whole
    ]
    parts: dict[RunPosition, list[_Part]] = {}
    for name, log in logs.items():
        for place, part in _parts(name, log).items():
            parts.setdefault(place, []).append(part)
    places = {place: _attempt(path, place, parts[place]) for place in sorted(parts)}
    run = Run(
        name=str(path), places=places, alone=alone, damaged=all(not log.whole for log in logs.values())
    )  # fmt: skip
    if not run.operations:
        gaps.append("no call is recorded")
    if not alone:
        gaps += _missing(places)
    return replace(run, gaps=tuple(gaps))


def _parts(name: str, log: Log) -> dict[RunPosition, _Part]:
    """The last attempt at each place that a file tells of."""
    found: dict[RunPosition, _Part] = {}
    last, place = 0, None
    for line, following in zip(log.lines, _following(log.lines), strict=True):
        if isinstance(line, StepBegun):
            place = RunPosition(line.step, False)
            for later in [known for known in found if known >= place]:
                del found[later]
            last = line.step
        elif line.step is not None:
            place = RunPosition(line.step, False)
        else:
            place = RunPosition(last if following is None else max(last, following - 1), True)
        if place not in found:
            found[place] = _Part(name, line.view, line.world, line.rank, [], cut=False)
        if isinstance(line, OperationRecord):
            found[place].records.append(line)
    if place is not None and not log.whole:
        found[place] = replace(found[place], cut=True)
    return found


def _following(lines: Sequence[StepBegun | OperationRecord]) -> list[int | None]:
    """For each line the step that begins next, from there on."""
    steps: list[int | None] = []
    following = None
    for line in reversed(lines):
        following = line.step if isinstance(line, StepBegun) else following
        steps.append(following)
    return steps[::-1]


def _attempt(path: Path, place: RunPosition, parts: Sequence[_Part]) -> Attempt:
    """Of all that files have of a place what counts. Raises AuditError where it cannot be of one run."""
    last = max(parts, key=lambda part: part.view)
    chosen: dict[int, _Part] = {}
    for part in parts:
        if part.view == last.view and part.world != last.world:
            raise AuditError(
                f"in view {last.view} the world has {last.world} ranks by {last.file} and {part.world} by {part.file}: "
                "these are not of one run",
                path=str(path),
            )
        if part.view < last.view and not place.outside:
            continue
        other = chosen.get(part.rank)
        if other is not None and other.view == part.view:
            raise AuditError(
                f"{other.file} and {part.file} are both of rank {part.rank} in view {part.view}: these are not of one "
                "run",
                path=str(path),
            )
        if other is None or other.view < part.view:
            chosen[part.rank] = part
    ranks = sorted(chosen)
    return Attempt(
        view=last.view,
        world=last.world,
        ranks={rank: chosen[rank].records for rank in ranks},
        cut=tuple(rank for rank in ranks if chosen[rank].cut),
    )


def _missing(places: Mapping[RunPosition, Attempt]) -> Iterator[str]:
    lacking: dict[int, list[RunPosition]] = {}
    for place, attempt in places.items():
        for rank in attempt.missing:
            lacking.setdefault(rank, []).append(place)
    for rank in sorted(lacking):
        where = lacking[rank]
        yield f"nothing of rank {rank} in {len(where)} of {len(places)} places, first in {where[0]}"


def audit_file(directory: str | Path, node: str) -> Path:
    """Return where a node's file lies in the directory of a run. Raises LocalError for a name that is no file's."""
    if not node or "/" in node or node.startswith("."):
        raise LocalError(f"{node!r} cannot be the name of a file")
    return Path(directory) / (node + SUFFIX)
