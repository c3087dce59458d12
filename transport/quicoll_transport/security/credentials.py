"""A node's own certificate, key and trusted authorities, from files or memory, under the checks that a peer would make.

No key, and no part of one, is ever in a message or a repr.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key

from quicoll_transport.errors import AuthenticationError, ConfigurationError
from quicoll_transport.security.identity import Identity
from quicoll_transport.security.verification import UNREADABLE, format_date, identity_of, is_authority, verify_peer

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Credentials", "PrivateKey"]

AUTHORITY_FILE = "ca.pem"
AUTHORITY_KEY_FILE = "ca.key"

PrivateKey: TypeAlias = Ed25519PrivateKey | EllipticCurvePrivateKey

# A certificate takes about 1 KiB; the bound is there to give a clear error for a path that is something else.
_MAX_FILE = 1 << 20


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Credentials:
    """A node's means to prove itself and to verify others. Made by `load`, `from_directory` or `from_parts`.

    Attributes:
        identity: What `certificate` says.
        certificate: The node's own.
        chain: Intermediates in the order of signing, mostly empty.
        private_key: The certificate's key.
        trust: Authorities that peers may be signed by; more than one while an authority is being replaced.
    """

    identity: Identity
    certificate: x509.Certificate
    chain: tuple[x509.Certificate, ...]
    private_key: PrivateKey = field(repr=False)
    trust: tuple[x509.Certificate, ...]

    @classmethod
    def from_parts(
        cls,
        certificate: x509.Certificate,
        *,
        private_key: PrivateKey,
        trust: Sequence[x509.Certificate],
        chain: Sequence[x509.Certificate] = (),
        now: datetime | None = None,
    ) -> Self:
        """Make credentials of what is in memory, under the same checks that a peer would make.

        Args:
            certificate: The node's own.
            private_key: Its key.
            trust: Authorities that peers may be signed by.
            chain: Intermediates in the order of signing.
            now: The date at which certificates have to be valid, aware; None for the system's clock.
        Raises:
            ConfigurationError: The key is not the certificate's, or every peer would refuse the certificate.
        """
        if not _belongs(private_key, certificate):
            raise ConfigurationError("the private key does not belong to the certificate")
        try:
            identity = identity_of(certificate)
            verify_peer(
                certificate, chain, trust=trust, job=identity.job, now=datetime.now(UTC) if now is None else now
            )
        except AuthenticationError as error:
            raise ConfigurationError(f"every peer would refuse this certificate: {error.reason}") from error
        return cls(
            identity=identity,
            certificate=certificate,
            chain=tuple(chain),
            private_key=private_key,
            trust=tuple(trust),
        )

    @classmethod
    def load(
        cls,
        *,
        certificate: str | os.PathLike[str],
        key: str | os.PathLike[str],
        authority: str | os.PathLike[str],
        now: datetime | None = None,
    ) -> Self:
        """Load credentials from PEM files.

        Args:
            certificate: The node's own certificate, then any intermediates.
            key: Unencrypted PKCS#8, Ed25519 or P-256, readable by its owner alone.
            authority: One or more CA certificates.
            now: As in `from_parts`.
        Raises:
            ConfigurationError: Names the file and what is wrong with it.
        """
        own, *chain = read_certificates(certificate)
        trust = read_certificates(authority)
        for entry in trust:
            if not is_authority(entry):
                raise ConfigurationError(f"{_name(authority)}: holds a certificate that is no CA")
        private_key = read_private_key(key)
        if not _belongs(private_key, own):
            raise ConfigurationError(f"{_name(key)}: is not the key of {_name(certificate)}")
        try:
            return cls.from_parts(own, private_key=private_key, trust=trust, chain=chain, now=now)
        except ConfigurationError as error:
            raise ConfigurationError(f"{_name(certificate)}: {error}") from error

    @classmethod
    def from_directory(
        cls, directory: str | os.PathLike[str], *, role: str, node: str, now: datetime | None = None
    ) -> Self:
        """Load credentials from `ca.pem`, `<role>-<node>.pem` and `<role>-<node>.key`, as `quicoll certs` writes them.

        Args:
            directory: Where they lie.
            role: The node's role.
            node: Its name.
            now: As in `from_parts`.
        Raises:
            ConfigurationError: A file is missing or wrong, or the certificate is another node's.
        """
        wanted = Identity("any", role, node)
        certificate, key = node_files(directory, role=role, node=node)
        found = cls.load(certificate=certificate, key=key, authority=Path(directory, AUTHORITY_FILE), now=now)
        if (found.identity.role, found.identity.node) != (wanted.role, wanted.node):
            raise ConfigurationError(f"{_name(certificate)}: is the certificate of {found.identity}, not of {wanted}")
        return found

    @property
    def authority_pem(self) -> bytes:
        """The trusted authorities as one PEM text, aioquic's `cadata`."""
        return b"".join(entry.public_bytes(Encoding.PEM) for entry in self.trust)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate's DER form, 64 lower-case hexadecimal digits."""
        return self.certificate.fingerprint(hashes.SHA256()).hex()

    def __repr__(self) -> str:
        return (
            f"<Credentials {self.identity.uri} valid until {format_date(self.certificate.not_valid_after_utc)}"
            f" sha256={self.fingerprint[:16]}...>"
        )


def node_files(directory: str | os.PathLike[str], *, role: str, node: str) -> tuple[Path, Path]:
    """Return the paths of a node's certificate and key in a directory of certificates."""
    stem = f"{role}-{node}"
    return Path(directory, f"{stem}.pem"), Path(directory, f"{stem}.key")


def read_certificates(path: str | os.PathLike[str]) -> list[x509.Certificate]:
    """Read the PEM certificates of a file, at least one. Raises ConfigurationError."""
    data = _read(path, private=False)
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise ConfigurationError(f"{_name(path)}: holds no readable PEM certificate") from error


def read_private_key(path: str | os.PathLike[str]) -> PrivateKey:
    """Read the PEM key of a file that only its owner may read. Raises ConfigurationError."""
    data = _read(path, private=True)
    # Raised outside of the except clause: what a parser says about a key does not belong into a traceback.
    key, reason = None, "holds no readable PEM private key"
    try:
        key = load_pem_private_key(data, password=None)
    except TypeError:
        reason = "is encrypted; a node starts without anybody at hand to type a passphrase"
    except (ValueError, UnsupportedAlgorithm):
        pass
    if key is None:
        raise ConfigurationError(f"{_name(path)}: {reason}")
    if isinstance(key, Ed25519PrivateKey) or (
        isinstance(key, EllipticCurvePrivateKey) and isinstance(key.curve, SECP256R1)
    ):
        return key
    raise ConfigurationError(f"{_name(path)}: the key must be Ed25519 or P-256")


def _belongs(key: PrivateKey, certificate: x509.Certificate) -> bool:
    try:
        return key.public_key() == certificate.public_key()
    except UNREADABLE:
        return False


def _read(path: str | os.PathLike[str], *, private: bool) -> bytes:
    """The file's bytes; the permissions are those of the very file that is read, not of what the path named before."""
    try:
        # O_NONBLOCK: a path that names a FIFO must not hang the start of a node.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigurationError(f"{_name(path)}: is not a regular file")
            if private and status.st_mode & 0o077:
                raise ConfigurationError(
                    f"{_name(path)}: others than its owner may use this key (mode {stat.S_IMODE(status.st_mode):04o});"
                    " chmod 600 it, and issue another if somebody may have read it"
                )
            data = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise ConfigurationError(f"{_name(path)}: cannot be read: {error.strerror}") from error
    if len(data) > _MAX_FILE:
        raise ConfigurationError(f"{_name(path)}: is larger than {_MAX_FILE} bytes, so it is not a PEM file of ours")
    return data


def _name(path: str | os.PathLike[str]) -> str:
    return os.fsdecode(path)
