"""What the signatures of an audit prove (`quicoll.audit.seal`): who computed what, when, in which view, from what.

For each node's file:

    every seal      can be read, follows the one before it, is signed by the certificate that it shows; that was issued
                    by an authority of ours, for this job and this node, and was valid at the time that the seal says
    its lines       are there, and are the very bytes that were signed

and between the files: what has to be equal on all ranks is (OperationRecord.agreed), so a rank that made up a result
stands against the others.

What is found is of two kinds. A fault proves that something is not as it was signed: altered, cut off, exchanged, or
signed by somebody else. A gap is something that nobody has vouched for: lines after the last signature, as a process
that was killed leaves them; a file without its end; a rank without a file. Whoever removes the end of a file and of its
signatures, down to an earlier one, is seen as a gap: the signature "closed" is missing, and the other ranks' files go
on.

Files may lie. Their sizes are bounded, and nothing that they say is printed as it is (`printable`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from quicoll.audit.log import SUFFIX, Log, OperationRecord, StepBegun, load_run, read_log
from quicoll.audit.seal import CONTEXT, SEAL_FORMAT, Seal, seal_file
from quicoll.errors import AuditError
from quicoll.observability.flight_record import printable
from quicoll_transport.errors import AuthenticationError
from quicoll_transport.security.identity import WORKER
from quicoll_transport.security.verification import MAX_CHAIN, UNREADABLE, verify_peer

if TYPE_CHECKING:
    from quicoll.audit.log import Run

__all__ = ["SignedFile", "SignedStretch", "Verification", "verify_run"]

_MOST_SEALS = 256 << 20  # bytes
_decoder = msgspec.json.Decoder(Seal)


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedStretch:
    """What one process of a node did, from the opening of its audit on.

    Attributes:
        opened: When, as it says.
        until: The time of its last signature.
        closed: Whether that is the last word of a process that ended in order.
        version: Of quicoll.
        code: Of the program, as that said.
        fingerprint: Of what decides bits there.
        environment: The same in full.
        from_step: The step whose state it began with.
        source: What that was read from; "" where nothing was read.
        certificates: SHA-256 of each certificate that signed, in hexadecimal.
        views: First and last; 0 where there was no step.
        steps: First and last that it began.
        calls: How many lines of calls are signed.
    """

    opened: str
    until: str
    closed: bool
    version: str
    code: str
    fingerprint: str
    environment: dict[str, str]
    from_step: int
    source: str
    certificates: tuple[str, ...]
    views: tuple[int, int]
    steps: tuple[int, int]
    calls: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedFile:
    """What is known of one node's file.

    Attributes:
        name: Of the file.
        node: As the file says; "" where it cannot be read.
        signed: How many of its lines are vouched for.
        stretches: Who did what, as far as that is proved.
        faults: What is not as it was signed, in sentences.
        gaps: What nobody has vouched for, likewise.
    """

    name: str
    node: str
    signed: int
    stretches: tuple[SignedStretch, ...]
    faults: tuple[str, ...]
    gaps: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result for a run.

    Attributes:
        job: Its name.
        files: By file.
        faults: Those of the files, and what ranks contradict each other in.
        gaps: Those of the files, and what is missing of the run.
    """

    job: str
    files: tuple[SignedFile, ...]
    faults: tuple[str, ...]
    gaps: tuple[str, ...]


def verify_run(path: str | Path, trust: Sequence[x509.Certificate]) -> Verification:
    """Check the signatures of a run.

    Args:
        path: The directory of the run, or the file of one rank.
        trust: Authorities of the job.
    Returns:
        What is proved, and what is not.
    Raises:
        AuditError: There is no audit, or it cannot be read at all.
    """
    path = Path(path)
    names = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    files: list[SignedFile] = []
    job = ""
    for each in names:
        try:
            log = read_log(each)
        except AuditError as error:
            files.append(_unproved(each.name, f"{error.message}"))
            continue
        job = job or log.job
        files.append(_File(each, log, trust).verified())
    files += [
        _unproved(each.name, "the audit that it signs is not there")
        for each in (sorted(path.glob("*.seal")) if path.is_dir() else ())
        if not each.with_suffix(SUFFIX).is_file()
    ]
    faults = [f"{file.name}: {fault}" for file in files for fault in file.faults]
    gaps = [f"{file.name}: {gap}" for file in files for gap in file.gaps]
    try:
        run = load_run(path)
    except AuditError as error:
        if not files:
            raise
        faults.append(error.message)
    else:
        gaps += run.gaps
        faults += _contradictions(run)
    return Verification(job=job, files=tuple(files), faults=tuple(faults), gaps=tuple(gaps))


def _unproved(name: str, fault: str) -> SignedFile:
    return SignedFile(name=name, node="", signed=0, stretches=(), faults=(fault,), gaps=())


def _contradictions(run: Run) -> list[str]:
    """Results that have to be equal on all ranks and are not."""
    found: list[str] = []
    for place, attempt in run.places.items():
        said: dict[tuple[int, str, int, str], tuple[int, str]] = {}
        for rank, records in attempt.ranks.items():
            for each in records:
                if not each.agreed:
                    continue
                key = (each.view, each.group, each.seq, each.op)
                first = said.setdefault(key, (rank, each.result))
                if first[1] != each.result:
                    what = f"{printable(each.op, 256)}, number {each.seq} in group {printable(each.group, 64)}"
                    found.append(f"{place}: ranks {first[0]} and {rank} signed different results of {what}")
    return found


@dataclass(slots=True)
class _Read:
    seal: Seal
    signature: bytes
    text: bytes


class _File:
    """The check of one node's file. faults, gaps: as in SignedFile."""

    def __init__(self, path: Path, log: Log, trust: Sequence[x509.Certificate]) -> None:
        self._path = path
        self._log = log
        self._trust = trust
        self._faults: list[str] = []
        self._gaps: list[str] = []

    def verified(self) -> SignedFile:
        try:
            with seal_file(self._path).open("rb") as seals:
                data = seals.read(_MOST_SEALS + 1)
            lines = self._path.read_bytes().splitlines(keepends=True)
        except OSError as error:
            why = error.strerror or str(error)
            return self._told(0, [], f"it is not signed: {seal_file(self._path).name} cannot be read: {why}")
        if len(data) > _MOST_SEALS:
            return self._told(0, [], f"its signatures are more than {_MOST_SEALS >> 20} MiB")
        proved = self._prove(data)
        signed = self._compare(lines, proved)
        bad = len(self._log.lines) + 2  # behind the header and the good ones
        if not self._log.whole:
            (self._faults if bad <= signed else self._gaps).append(f"its line {bad} was altered, or torn")
        if proved:
            rest, closed = len(lines) - signed, proved[-1][0].why == "closed"
            if not closed:
                self._gaps.append(
                    "the signature of its end is missing: the process was killed, or the end was taken away"
                )
            if rest > 0 and not self._faults:
                (self._faults if closed else self._gaps).append(f"its last {rest} lines are not signed")
        return self._told(signed, proved)

    def _told(self, signed: int, proved: list[tuple[Seal, str]], *faults: str) -> SignedFile:
        stretches = _stretches(proved, self._log, signed) if not self._faults else ()
        return SignedFile(
            name=self._path.name,
            node=self._log.node,
            signed=signed,
            stretches=stretches,
            faults=(*self._faults, *faults),
            gaps=tuple(self._gaps),
        )

    def _prove(self, data: bytes) -> list[tuple[Seal, str]]:
        """Return the seals that prove something, with the fingerprint of the certificate; up to the first bad one."""
        proved: list[tuple[Seal, str]] = []
        previous = ""
        shown: tuple[str, ...] = ()
        for number, line in enumerate(data.splitlines(keepends=True), start=1):
            if not line.endswith(b"\n"):
                self._gaps.append(f"signature {number} is torn")
                break
            try:
                read = _parsed(line)
                shown = read.seal.certificates or shown
                if read.seal.previous != previous:
                    raise _Refused("does not follow the one before it: a signature is missing, or of another file")
                proved.append((read.seal, self._signer(read, shown)))
            except _Refused as error:
                self._faults.append(f"signature {number} {error}")
                break
            previous = hashlib.sha256(line).hexdigest()
        if not proved and not self._faults:
            self._faults.append("it is not signed")
        return proved

    def _signer(self, read: _Read, shown: tuple[str, ...]) -> str:
        """Return the fingerprint of who signed. Raises _Refused."""
        seal = read.seal
        if (seal.job, seal.node) != (self._log.job, self._log.node):
            raise _Refused(f"is of {printable(seal.node, 64)} in job {printable(seal.job, 64)}, and was put here")
        chain = _chain(shown)
        own = chain[0]
        try:
            key = own.public_key()
            if isinstance(key, Ed25519PublicKey):
                key.verify(read.signature, CONTEXT + read.text)
            elif isinstance(key, EllipticCurvePublicKey):
                key.verify(read.signature, CONTEXT + read.text, ECDSA(hashes.SHA256()))
            else:
                raise _Refused("is made with a kind of key that no node has")
        except InvalidSignature:
            raise _Refused("is not the certificate's: it was altered, or exchanged") from None
        except UNREADABLE:
            raise _Refused("shows a certificate whose key cannot be read") from None
        try:
            at = datetime.fromisoformat(seal.time)
        except ValueError:
            at = None
        if at is None or at.tzinfo is None:
            raise _Refused("has no time")
        try:
            identity = verify_peer(own, chain[1:], trust=self._trust, job=seal.job, now=at)
        except AuthenticationError as error:
            raise _Refused(f"shows a certificate that is not accepted: {printable(error.reason, 512)}") from None
        if (identity.role, identity.node) != (WORKER, seal.node):
            raise _Refused(f"is by {identity}, and the file is of {WORKER}/{seal.node}")
        return own.fingerprint(hashes.SHA256()).hex()

    def _compare(self, lines: list[bytes], proved: list[tuple[Seal, str]]) -> int:
        """Compare the lines with what was signed, and return how many are vouched for."""
        state = hashlib.sha256()
        done = 0
        for number, (seal, _) in enumerate(proved, start=1):
            if seal.lines < done:
                self._faults.append(
                    f"signature {number} is over {seal.lines} lines, and the one before it over {done}: "
                    "lines were gone when the process began again"
                )
                return done
            if seal.lines > len(lines):
                self._faults.append(
                    f"cut off: signature {number} is over {seal.lines} lines, and there are {len(lines)}"
                )
                return done
            for line in lines[done : seal.lines]:
                state.update(line)
            if state.hexdigest() != seal.digest:
                self._faults.append(f"lines {done + 1} to {seal.lines} are not those that were signed at {seal.time}")
                return done
            done = seal.lines
        return done


class _Refused(Exception):
    """Why a seal proves nothing, as the rest of a sentence."""


def _parsed(line: bytes) -> _Read:
    signature, _, text = line[:-1].partition(b" ")
    try:
        seal = _decoder.decode(text)
        found = _Read(seal, base64.b64decode(signature, validate=True), text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, binascii.Error):
        raise _Refused("cannot be read") from None
    if seal.format != SEAL_FORMAT:
        raise _Refused(f"is of the format {printable(seal.format, 64)!r}, and {SEAL_FORMAT!r} is read here")
    return found


def _chain(shown: tuple[str, ...]) -> list[x509.Certificate]:
    if not 0 < len(shown) <= MAX_CHAIN:
        raise _Refused("shows no certificate" if not shown else f"shows more than {MAX_CHAIN} certificates")
    try:
        return [x509.load_der_x509_certificate(base64.b64decode(each, validate=True)) for each in shown]
    except (ValueError, binascii.Error):
        raise _Refused("shows a certificate that cannot be read") from None


def _stretches(proved: list[tuple[Seal, str]], log: Log, signed: int) -> tuple[SignedStretch, ...]:
    found: list[SignedStretch] = []
    starts = [index for index, (seal, _) in enumerate(proved) if seal.why == "opened"]
    for start, stop in pairwise([*starts, len(proved)]):
        seals = proved[start:stop]
        opened, last = seals[0][0], seals[-1][0]
        resumed = [seal for seal, _ in seals if seal.why == "resumed"]
        origin = resumed[-1] if resumed else opened
        # Line 1 is the header, which is not among the log's lines.
        lines = log.lines[max(opened.lines - 1, 0) : max(min(last.lines, signed) - 1, 0)]
        begun = [line for line in lines if isinstance(line, StepBegun)]
        found.append(
            SignedStretch(
                opened=opened.time,
                until=last.time,
                closed=last.why == "closed",
                version=opened.version,
                code=opened.code,
                fingerprint=opened.fingerprint,
                environment=opened.environment,
                from_step=origin.step,
                source=origin.source,
                certificates=tuple(dict.fromkeys(by for _, by in seals)),
                views=(begun[0].view, begun[-1].view) if begun else (0, 0),
                steps=(begun[0].step, begun[-1].step) if begun else (0, 0),
                calls=sum(isinstance(line, OperationRecord) for line in lines),
            )
        )
    return tuple(found)
