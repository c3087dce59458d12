"""Identities of nodes and their proof: certificates in, `Identity` out, or an error with the precise reason.

A node's identity is one URI in its certificate, `spiffe://quicoll/<job>/<role>/<node>`, in the form of an X.509-SVID
(SPIFFE, "X.509-SVID" sections 2, 4 and 5): exactly one URI among the subject alternative names, a leaf that is no CA, a
key that may sign. TLS 1.3 proves that the peer holds the certificate's key (RFC 8446 section 4.4.3); this module
proves that the certificate is one of ours. Neither is enough alone, and aioquic does only the first for clients.

Order of the checks in `verify_peer`: the chain up to one of our authorities comes first, and nothing that the
certificate says is read before. So whatever a reason quotes was signed by an authority of ours, and a stranger can
put no text into our logs.

The time is an argument (`now`), so that a simulation or a test decides it. No key, and no part of one, is ever in a
message or a repr.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeAlias

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID
from OpenSSL import crypto

from quicoll_transport.errors import AuthenticationError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "COORDINATOR",
    "MAX_CHAIN",
    "WORKER",
    "Credentials",
    "Identity",
    "PrivateKey",
    "identity_of",
    "verify_peer",
]

COORDINATOR = "coordinator"
WORKER = "worker"

MAX_CHAIN = 4
"""Certificates that a peer may send, its own among them; more are refused before any signature is checked."""

AUTHORITY_FILE = "ca.pem"
AUTHORITY_KEY_FILE = "ca.key"

PrivateKey: TypeAlias = Ed25519PrivateKey | EllipticCurvePrivateKey

_PREFIX = "spiffe://quicoll/"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
# A certificate takes about 1 KiB; the bound is there to give a clear error for a path that is something else.
_MAX_FILE = 1 << 20
# What cryptography raises, on first access, for extensions and keys that it cannot read.
_UNREADABLE = (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, UnsupportedAlgorithm)

_PURPOSES = ((ExtendedKeyUsageOID.CLIENT_AUTH, "clientAuth"), (ExtendedKeyUsageOID.SERVER_AUTH, "serverAuth"))

# OpenSSL's X509_V_ERR_* (x509_vfy.h), as far as a better sentence than its own can be said.
_NOT_YET_VALID = 9
_EXPIRED = 10
_NO_ISSUER = (18, 19, 20, 21)


@dataclass(frozen=True, slots=True, order=True)
class Identity:
    """A node of a job. Ordered by (job, role, node).

    Each name has 1 to 64 of A-Z a-z 0-9 . _ - and is neither "." nor ".." (SPIFFE-ID section 2.2).

    Attributes:
        job: The job; nodes of different jobs never meet.
        role: Such as "worker" or "coordinator".
        node: Unique in the job for its role.
    Raises:
        ConfigurationError: One of the names is none.
    """

    job: str
    role: str
    node: str

    def __post_init__(self) -> None:
        for name in ("job", "role", "node"):
            value = getattr(self, name)
            if not isinstance(value, str) or _NAME.fullmatch(value) is None or value in (".", ".."):
                raise ConfigurationError(f"{name} must be 1 to 64 of A-Z a-z 0-9 . _ - (not . or ..), is {value!r:.80}")

    @property
    def uri(self) -> str:
        """The certificate's URI, `spiffe://quicoll/<job>/<role>/<node>`."""
        return f"{_PREFIX}{self.job}/{self.role}/{self.node}"

    @classmethod
    def parse(cls, uri: str) -> Self:
        """Return the identity named by `uri`. Raises ConfigurationError unless `uri` is exactly what `.uri` gives."""
        parts = uri.removeprefix(_PREFIX).split("/")
        if not uri.startswith(_PREFIX) or len(parts) != 3:
            raise ConfigurationError(f"not of the form {_PREFIX}<job>/<role>/<node>: {uri!r:.280}")
        return cls(*parts)

    def __str__(self) -> str:
        return f"{self.role}/{self.node}"


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
            f"<Credentials {self.identity.uri} valid until {_date(self.certificate.not_valid_after_utc)}"
            f" sha256={self.fingerprint[:16]}...>"
        )


def verify_peer(
    certificate: x509.Certificate | None,
    chain: Sequence[x509.Certificate] = (),
    *,
    trust: Sequence[x509.Certificate],
    job: str,
    now: datetime,
) -> Identity:
    """Verify the certificate of a peer that has proved to hold its key, and return the peer's identity.

    Args:
        certificate: The peer's; None when it sent none.
        chain: The other certificates that it sent, in any order.
        trust: Our authorities.
        job: The only job whose nodes are accepted.
        now: The date at which the certificates have to be valid, aware.
    Raises:
        AuthenticationError: The peer is not accepted, with the reason.
        ConfigurationError: `trust` or `now` cannot be used.
    """
    if now.tzinfo is None:
        raise ConfigurationError("now must be an aware datetime: certificates are dated in UTC")
    if certificate is None:
        raise AuthenticationError("the peer sent no certificate")
    if 1 + len(chain) > MAX_CHAIN:
        raise AuthenticationError(f"the peer sent {1 + len(chain)} certificates, at most {MAX_CHAIN} are accepted")
    _verify_chain(certificate, chain, trust=trust, now=now.astimezone(UTC))
    _verify_usage(certificate)
    identity = identity_of(certificate)
    if identity.job != job:
        raise AuthenticationError(f"the certificate is for job {identity.job!r}, not {job!r}", peer=identity.node)
    return identity


def identity_of(certificate: x509.Certificate) -> Identity:
    """Return the identity that `certificate` claims, unverified. Raises AuthenticationError unless it names one."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    except _UNREADABLE as error:
        raise AuthenticationError("the certificate's extensions cannot be read") from error
    if len(uris) != 1:
        raise AuthenticationError(f"the certificate must name exactly one URI ({_PREFIX}...), it names {len(uris)}")
    try:
        return Identity.parse(uris[0])
    except ConfigurationError as error:
        raise AuthenticationError(f"the certificate's URI is malformed: {error}") from error


def is_authority(certificate: x509.Certificate) -> bool:
    """Return whether `certificate` says that it may sign others (basicConstraints CA)."""
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, *_UNREADABLE):
        return False


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


def _verify_chain(
    certificate: x509.Certificate,
    chain: Sequence[x509.Certificate],
    *,
    trust: Sequence[x509.Certificate],
    now: datetime,
) -> None:
    """Signatures, dates, CA flags, path lengths and name constraints up to one of `trust` (RFC 5280 section 6)."""
    store = crypto.X509Store()
    # OpenSSL takes a self-signed version 1 certificate in the store for a CA; ours have to say that they are one.
    if not trust or not all(map(is_authority, trust)):
        raise ConfigurationError("trust must be one or more certificates of authorities (basicConstraints CA)")
    for entry in trust:
        store.add_cert(crypto.X509.from_cryptography(entry))
    store.set_time(now)
    try:
        crypto.X509StoreContext(
            store,
            crypto.X509.from_cryptography(certificate),
            [crypto.X509.from_cryptography(entry) for entry in chain],
        ).verify_certificate()
    except crypto.X509StoreContextError as error:
        raise AuthenticationError(_chain_reason(error, now)) from error
    except crypto.Error as error:
        raise AuthenticationError("a certificate of the peer cannot be read") from error


def _chain_reason(error: crypto.X509StoreContextError, now: datetime) -> str:
    code, depth, text = error.errors
    which = "the certificate" if depth == 0 else f"the certificate {depth} above the peer's own"
    if code == _EXPIRED:
        until = error.certificate.to_cryptography().not_valid_after_utc
        return f"{which} expired at {_date(until)}, now is {_date(now)}"
    if code == _NOT_YET_VALID:
        since = error.certificate.to_cryptography().not_valid_before_utc
        return f"{which} is not valid before {_date(since)}, now is {_date(now)}"
    if code in _NO_ISSUER:
        return f"{which} was not signed by an authority that we trust ({text})"
    return f"the chain of certificates is broken at depth {depth}: {text}"


def _verify_usage(certificate: x509.Certificate) -> None:
    """The leaf's own fitness: a kind of key that we take, no CA, and usable by a node, which both dials and listens."""
    try:
        key = certificate.public_key()
        extensions = certificate.extensions
    except _UNREADABLE as error:
        raise AuthenticationError("the certificate cannot be read") from error
    if not (
        isinstance(key, Ed25519PublicKey)
        or (isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1))
    ):
        raise AuthenticationError("the certificate's key must be Ed25519 or P-256")
    for extension in extensions:
        match extension.value:
            case x509.BasicConstraints(ca=True):
                raise AuthenticationError("the certificate is an authority's; a node must not be able to sign others")
            case x509.KeyUsage(digital_signature=False):
                raise AuthenticationError("the certificate's key usage allows no signature")
            case x509.ExtendedKeyUsage() as usage if ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE not in usage:
                for purpose, name in _PURPOSES:
                    if purpose not in usage:
                        raise AuthenticationError(f"the certificate's extended key usage lacks {name}")


def _belongs(key: PrivateKey, certificate: x509.Certificate) -> bool:
    try:
        return key.public_key() == certificate.public_key()
    except _UNREADABLE:
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


def _date(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%d %H:%M:%SZ")
