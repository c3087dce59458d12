"""What every collective was given and what it gave, by digest: two runs are compared without keeping their tensors.

Each rank writes one file, one line for each collective that succeeded, and one for the beginning of each step. The
promise is the same bits in every run, so two such runs differ in no line that counts; if they do differ, the first
difference says where to look:

    calls    the ranks asked for different collectives, or in another order: the programs differ
    inputs   the same call, but a leaf has other bits: what the named rank computed since the call before differs
    result   the same leaves, but another result: a fault of quicoll, of memory, or of a processor
    missing  one run has no record of a step or a call that the other has

Two runs need not have the same number of ranks. Leaves have numbers of their own (logical shards), so inputs are
compared leaf by leaf, whoever held them; results that are equal on all ranks are compared as one; results that belong
to a rank (of a scatter, say) only if both runs have as many ranks. Nor need they have the same history: an attempt at a
step that was aborted is superseded by the next, in each file by the later line, between files by the higher view.

The file. Lines of text: 16 hexadecimal digits, a space, one JSON object, a newline. The digits are XXH3-64 of the
digits of the line before (of nothing, in the first) and of the JSON text, so that a line is good only if all before it
are. The first object names format, job and node. Each line is one write, so a process that is killed leaves whole lines
and at most one half; a machine that loses power may leave less. Readers take the lines up to the first that is not
good, and say that there was one. A writer that finds a file goes on after its last good line.

There are no times in it: the files of two equal runs are equal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import xxhash

from quicoll.errors import AuditError, LocalError

__all__ = ["AuditLog", "Begin", "Difference", "Record", "Run", "audit_file", "diff", "load_run", "read_log"]

SUFFIX = ".audit"
_FORMAT = "quicoll-audit-1"


class _Header(msgspec.Struct, frozen=True, kw_only=True, tag="header", tag_field="kind"):
    format: str
    job: str
    node: str


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin", tag_field="kind"):
    """A step begins: earlier lines of this step and of later ones are of attempts that were given up."""

    step: int
    view: int
    rank: int
    world: int


class Record(msgspec.Struct, frozen=True, kw_only=True, tag="op", tag_field="kind"):
    """One collective that succeeded on this rank.

    step: the open step's number, None outside of one. group, seq: which group, and the number of the collective in it.
    op: what was called, without what may differ between equal runs (world size, algorithm, chunks), for instance
    "all_reduce float32 (3,5) sum default". inputs: number of each leaf passed on this rank (its rank where there are no
    leaves) and the digest of its elements. result: digest, "" where this rank got nothing. agreed: whether the result
    has to be equal on all ranks. Digests are hexadecimal, xxh3-128 of the elements in C
    order.
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
    agreed: bool = True


_Line = _Header | Begin | Record
_encoder = msgspec.json.Encoder(order="deterministic")
_decoder: msgspec.json.Decoder[_Line] = msgspec.json.Decoder(_Line)


# ---------------------------------------------------------------------------------------------------------------------
# Writing and reading one file


class AuditLog:
    """Writes the file of one rank. Every method raises AuditError where the file cannot be written.

    path: the file; its directory is made. By habit `directory / (node + ".audit")`, which is where `load_run` looks.
    A file of the same job and node is continued; any other is refused.
    """

    def __init__(self, path: str | Path, *, job: str, node: str) -> None:
        self._path = Path(path)
        header = _Header(format=_FORMAT, job=job, node=node)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                self._chain = self._resume(header)
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as error:
            raise AuditError(f"cannot be written: {error}", path=str(self._path)) from error

    def begin(self, *, step: int, view: int, rank: int, world: int) -> None:
        """Note that a step begins, or begins again."""
        self._append(Begin(step=step, view=view, rank=rank, world=world))

    def record(self, record: Record) -> None:
        """Note a collective, after it has succeeded."""
        self._append(record)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _resume(self, header: _Header) -> str:
        with open(self._fd, "rb", closefd=False) as file:
            lines = list(_good_lines(file.read()))
        end = lines[-1].end if lines else 0
        if lines and lines[0].content != header:
            raise AuditError(f"it is the audit of another: {lines[0].content}", path=str(self._path))
        os.ftruncate(self._fd, end)
        os.lseek(self._fd, end, os.SEEK_SET)
        if not lines:
            self._chain = ""
            self._append(header)
            return self._chain
        return lines[-1].digits

    def _append(self, content: _Line) -> None:
        if self._fd < 0:
            raise AuditError("it is closed", path=str(self._path))
        text = _encoder.encode(content)
        digits = _digits(self._chain, text)
        line = digits.encode() + b" " + text + b"\n"
        try:
            start = os.lseek(self._fd, 0, os.SEEK_CUR)
            written = os.write(self._fd, line)
            if written != len(line):
                # What follows half a line would not be read.
                os.ftruncate(self._fd, start)
                os.lseek(self._fd, start, os.SEEK_SET)
        except OSError as error:
            raise AuditError(f"cannot be written: {error}", path=str(self._path)) from error
        if written != len(line):
            raise AuditError(f"only {written} of {len(line)} bytes of a line were written", path=str(self._path))
        self._chain = digits


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
        except msgspec.MsgspecError:  # of a later format, say
            return
        chain, start = digits.decode(), stop + 1
        yield _Good(chain, content, start)


@dataclass(frozen=True, slots=True)
class Log:
    """One file as read. whole: whether its last line was good."""

    job: str
    node: str
    lines: tuple[Begin | Record, ...]
    whole: bool


def read_log(path: str | Path) -> Log:
    """Read one file, up to the first line that is not good. Raises AuditError if there is no good one at its head."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise AuditError(f"cannot be read: {error}", path=str(path)) from error
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
class Place:
    """Where in a run: in a step, or outside after it (step 0 for before all)."""

    step: int
    outside: bool

    def __str__(self) -> str:
        return f"after step {self.step}, outside of any" if self.outside else f"step {self.step}"


@dataclass(frozen=True, slots=True)
class Run:
    """A run: what each rank did in each place, attempts that were given up left out. warnings: what was not good."""

    name: str
    places: dict[Place, dict[int, list[Record]]]
    warnings: tuple[str, ...]

    @property
    def operations(self) -> int:
        return sum(len(records) for ranks in self.places.values() for records in ranks.values())


def load_run(path: str | Path) -> Run:
    """Read a run: a file, or a directory with one file for each rank. Raises AuditError."""
    path = Path(path)
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise AuditError(f"there is no *{SUFFIX} in it", path=str(path))
    places: dict[Place, dict[int, tuple[int, list[Record]]]] = {}
    warnings = []
    for file in files:
        log = read_log(file)
        if not log.whole:
            warnings.append(f"{file.name} is good up to its line {len(log.lines) + 1} and not after")
        for place, (view, rank, records) in _attempts(log.lines).items():
            others = places.setdefault(place, {})
            if rank not in others or others[rank][0] < view:
                others[rank] = view, records
    ordered = {place: {rank: places[place][rank][1] for rank in sorted(places[place])} for place in sorted(places)}
    return Run(str(path), ordered, tuple(warnings))


def _attempts(lines: Sequence[Begin | Record]) -> dict[Place, tuple[int, int, list[Record]]]:
    """The last attempt at each place: its view and rank, and what was done."""
    found: dict[Place, tuple[int, int, list[Record]]] = {}
    last = 0
    for line in lines:
        if isinstance(line, Begin):
            place = Place(line.step, False)
            for later in [known for known in found if known >= place]:
                del found[later]
            last = line.step
            found[place] = line.view, line.rank, []
        else:
            place = Place(last, True) if line.step is None else Place(line.step, False)
            _, _, records = found.setdefault(place, (line.view, line.rank, []))
            records.append(line)
            found[place] = line.view, line.rank, records
    return found


# ---------------------------------------------------------------------------------------------------------------------
# The first difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first thing in which two runs differ.

    kind: see the head of the module. index: the call's number in this place, from 0; None where all of it is missing.
    rank: in each run the rank that it is about, None where no single one is. leaf: of inputs. a, b: what each has.
    """

    kind: Literal["calls", "inputs", "result", "missing"]
    place: Place
    index: int | None = None
    op: str = ""
    rank: tuple[int | None, int | None] = (None, None)
    leaf: int | None = None
    a: str
    b: str

    def __str__(self) -> str:
        where = str(self.place) + ("" if self.index is None else f", call {self.index}")
        ranks = (
            "" if self.rank == (None, None)
            else f", rank {self.rank[0]}" if self.rank[0] == self.rank[1]
            else f", rank {self.rank[0]} of A, {self.rank[1]} of B"
        )  # fmt: skip
        what = {
            "calls": "the calls differ",
            "inputs": f"leaf {self.leaf} has other bits",
            "result": "equal inputs gave another result",
            "missing": "only one run has it",
        }[self.kind]
        lines = [f"{where}{ranks}: {what}"]
        if self.op:
            lines.append(f"  {self.op}")
        return "\n".join([*lines, f"  A: {self.a}", f"  B: {self.b}"])


def diff(a: Run, b: Run) -> Difference | None:
    """The first difference of two runs, by place, then by call, then by rank; None if there is none."""
    for place in sorted({*a.places, *b.places}):
        of_a, of_b = a.places.get(place, {}), b.places.get(place, {})
        if not of_a or not of_b:
            if not any(of_a.values()) and not any(of_b.values()):
                continue
            have = [f"{len(ranks)} ranks" if ranks else "nothing" for ranks in (of_a, of_b)]
            return Difference(kind="missing", place=place, a=have[0], b=have[1])
        longest = max(len(records) for records in (*of_a.values(), *of_b.values()))
        for index in range(longest):
            found = _differ(place, index, _calls(of_a, index), _calls(of_b, index))
            if found is not None:
                return found
    return None


_Calls = dict[int, Record | None]


def _calls(ranks: dict[int, list[Record]], index: int) -> _Calls:
    return {rank: records[index] if index < len(records) else None for rank, records in ranks.items()}


def _differ(place: Place, index: int, a: _Calls, b: _Calls) -> Difference | None:
    same_world = a.keys() == b.keys()
    pairs = [(rank, rank) for rank in a] if same_world else [(min(a), min(b))]
    for left, right in pairs:
        one, other = a[left], b[right]
        if one is None or other is None or (one.group, one.op) != (other.group, other.op):
            if one is other:
                continue
            kind: Literal["calls", "missing"] = "missing" if one is None or other is None else "calls"
            return Difference(
                kind=kind, place=place, index=index, rank=(left, right), a=_call(one), b=_call(other)
            )  # fmt: skip
    op = next((record.op for record in a.values() if record is not None), "")
    leaves_a, leaves_b = _leaves(a), _leaves(b)
    for key in sorted({*leaves_a, *leaves_b} if same_world else leaves_a.keys() & leaves_b.keys()):
        (left_rank, one_digest), (right_rank, other_digest) = (
            leaves.get(key, (None, "nothing")) for leaves in (leaves_a, leaves_b)
        )
        if one_digest != other_digest:
            return Difference(
                kind="inputs", place=place, index=index, op=op, rank=(left_rank, right_rank), leaf=key[1],
                a=one_digest, b=other_digest,
            )  # fmt: skip
    for left, right in _compared_results(a, b, same_world):
        one, other = a[left], b[right]
        if one is not None and other is not None and one.result != other.result:
            return Difference(
                kind="result", place=place, index=index, op=op, rank=(left, right), a=one.result, b=other.result
            )
    return None


def _compared_results(a: _Calls, b: _Calls, same_world: bool) -> list[tuple[int, int]]:
    """Pairs of ranks. An agreed result of each rank is compared with the other run's first, so that one rank that had
    another than its own run's others is found as well."""
    if same_world:
        return [(rank, rank) for rank in a]
    first = a[min(a)]
    alike = [
        [
            rank
            for rank, record in calls.items()
            if record is not None and first is not None and record.agreed and record.group == first.group
        ]
        for calls in (a, b)
    ]
    if not alike[0] or not alike[1]:
        return []
    return [(rank, alike[1][0]) for rank in alike[0]] + [(alike[0][0], rank) for rank in alike[1]]


def _leaves(calls: _Calls) -> dict[tuple[str, int], tuple[int | None, str]]:
    """By group and number: the rank that passed a leaf, and its digest."""
    found: dict[tuple[str, int], tuple[int | None, str]] = {}
    for rank, record in calls.items():
        if record is not None:
            found.update({(record.group, leaf): (rank, digest) for leaf, digest in record.inputs})
    return found


def _call(record: Record | None) -> str:
    return "nothing" if record is None else f"{record.op} in group {record.group}"


def audit_file(directory: str | Path, node: str) -> Path:
    """Where a node's file lies in the directory of a run. Raises LocalError for a name that is no file's."""
    if not node or "/" in node or node.startswith("."):
        raise LocalError(f"{node!r} cannot be the name of a file")
    return Path(directory) / (node + SUFFIX)
