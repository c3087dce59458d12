"""Signatures over an audit: who vouches for its lines, when, and under what they were computed.

The audit of a node has no times and no names of versions, so that equal runs have equal files (`quicoll.audit.log`).
What is not equal stands beside it, in `<node>.seal`: one line for each signature, written when the audit is opened,
where a state was read from a checkpoint, when a view or SEAL_STEPS steps are over, and when the audit is closed. Each
line says how many lines of the audit it vouches for, and the SHA-256 of these; so lines of the audit that are altered,
added or taken away no longer fit, whatever their own checksums say.

A line: the signature in base64, a space, one JSON object (`Seal`), a newline. It is made with the key of the node's
certificate (Ed25519, or ECDSA on P-256 with SHA-256) over CONTEXT and the object's bytes. CONTEXT keeps it apart from
all else that the key signs, as the handshakes of TLS 1.3 (RFC 8446 section 4.4.3).

Invariants, on which `quicoll.audit.verify` rests:

    - each seal names its job and node, and holds the SHA-256 of the whole line before it: none can be taken from
      another file, left out or put elsewhere
    - the certificates that prove a signature stand in the same file, in the first seal that they are used for
    - what is vouched for was written before: a seal never covers lines that are not in the file

What a signature does not say: a node can vouch for lies, and its time is its own clock's. A process that is killed
leaves lines behind its last seal that nobody has signed; the reader is told how many.

No key, no setting, no variable of the environment is written but the two that decide bits
(`quicoll.audit.environment`).
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding

from quicoll.audit.appending import append_line
from quicoll.errors import AuditError

if TYPE_CHECKING:
    from quicoll_transport.security.credentials import Credentials, PrivateKey

__all__ = ["CONTEXT", "SEAL_FORMAT", "SEAL_STEPS", "Seal", "Sealer", "seal_file"]

SEAL_FORMAT = "quicoll-seal-1"
CONTEXT = b"quicoll audit seal 1\0"
SEAL_STEPS = 100
"""Steps after which there is another signature."""
_MOST = 64 << 20  # bytes of a file of seals that is gone on with


class Seal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a node signs.

    why: "opened", "resumed", "steps", "view", or "closed". time: RFC 3339, by the node's clock. lines, digest: how many
    lines of the audit, its first one included, and the SHA-256 of their bytes. previous: SHA-256 of the line before, ""
    in the first. view, step: of the newest attempt at a step in these lines; of "opened" and "resumed" the step of the
    state. source: what the state was read from. certificates: DER in base64, the node's own first; empty where they are
    those of the seal before. version, code, fingerprint, environment: of "opened": of quicoll, of the program as that
    says it, and what decides bits here.
    """

    format: str
    job: str
    node: str
    why: str
    time: str
    lines: int
    digest: str
    previous: str
    view: int = 0
    step: int = 0
    source: str = ""
    certificates: tuple[str, ...] = ()
    version: str = ""
    code: str = ""
    fingerprint: str = ""
    environment: dict[str, str] = {}


_encoder = msgspec.json.Encoder(order="deterministic")


def seal_file(audit: str | Path) -> Path:
    """Return where the signatures of an audit's file lie.

    Args:
        audit: The file.
    """
    return Path(audit).with_suffix(".seal")


class Sealer:
    """Signs an audit as it grows. Every method but `close` raises AuditError where its file cannot be written.

    Args:
        path: The file of seals; one that is there is continued, behind its last whole line.
        credentials: Gives the node's own, as they are now: certificates change while a job runs.
        now: The date and time, aware.
        about: What `Seal` has of the program and its environment; `step` and `source` of the state.
    """

    def __init__(
        self,
        path: Path,
        *,
        credentials: Callable[[], Credentials],
        now: Callable[[], datetime],
        about: Mapping[str, object],
    ) -> None:
        self._path = path
        self._credentials = credentials
        self._now = now
        self._about = dict(about)
        self._shown: tuple[str, ...] = ()
        self._previous = ""
        self._view = self._step = 0
        self._sealed_step = 0
        self._fd = -1

    def open(self, *, lines: int, digest: str) -> None:
        """Begin: vouch for the lines that are there.

        Args:
            lines: How many.
            digest: SHA-256 of their bytes, hexadecimal.
        """
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with open(self._fd, "rb", closefd=False) as file:
                data = file.read(_MOST)
            end = data.rfind(b"\n") + 1
            if end:
                self._previous = _hash(data[data.rfind(b"\n", 0, end - 1) + 1 : end])
            os.ftruncate(self._fd, end)
            os.lseek(self._fd, end, os.SEEK_SET)
        except OSError as error:
            self.close()
            raise self._unwritten(error) from error
        self._append("opened", lines=lines, digest=digest, about=self._about)

    def resumed(self, step: int, source: str, *, lines: int, digest: str) -> None:
        """Note that the state is now the one after `step`, read from `source`; the rest as in `open`."""
        self._append("resumed", lines=lines, digest=digest, about={"step": step, "source": source})

    def begins(self, step: int, view: int, *, lines: int, digest: str) -> None:
        """A step is about to begin: sign what was done before, where it is time for that.

        Args:
            step: Its number.
            view: In which view.
            lines: As in `open`, before the line of this beginning.
            digest: Likewise.
        """
        done = self._view, self._step
        self._view, self._step = view, step
        if done == (0, 0):
            self._sealed_step = step
        elif done[0] != view or abs(step - self._sealed_step) >= SEAL_STEPS:
            self._sealed_step = step
            why = "view" if done[0] != view else "steps"
            self._append(why, lines=lines, digest=digest, about={"view": done[0], "step": done[1]})

    def end(self, *, lines: int, digest: str) -> None:
        """Sign the whole; as in `open`. The file is closed then."""
        about = {"view": self._view, "step": self._step}
        try:
            self._append("closed", lines=lines, digest=digest, about=about)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file without a signature over what has come since the last one."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, why: str, *, lines: int, digest: str, about: Mapping[str, object]) -> None:
        credentials = self._credentials()
        chain = (credentials.certificate, *credentials.chain)
        certificates = tuple(base64.b64encode(each.public_bytes(Encoding.DER)).decode() for each in chain)
        told = msgspec.convert(
            {
                "format": SEAL_FORMAT,
                "job": credentials.identity.job,
                "node": credentials.identity.node,
                "why": why,
                "time": self._now().isoformat(timespec="microseconds"),
                "lines": lines,
                "digest": digest,
                "previous": self._previous,
                "certificates": () if certificates == self._shown else certificates,
                **about,
            },
            Seal,
        )
        text = _encoder.encode(told)
        line = base64.b64encode(_sign(credentials.private_key, CONTEXT + text)) + b" " + text + b"\n"
        append_line(self._fd, line, self._path)
        self._shown = certificates
        self._previous = _hash(line)

    def _unwritten(self, error: OSError) -> AuditError:
        return AuditError(f"cannot be written: {error.strerror or error}", path=str(self._path))


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _sign(key: PrivateKey, data: bytes) -> bytes:
    return key.sign(data) if isinstance(key, Ed25519PrivateKey) else key.sign(data, ECDSA(SHA256()))
