"""A job's certificate authority: a directory with `ca.pem` and `ca.key`, and the certificates of its nodes.

For one job, on machines that its owner can reach; a site that runs step-ca or SPIRE lets those sign instead
(docs/howto/certificates.md), and nothing else in this package knows the difference. What is made here:

    ca.pem   CA, path length 0, keyCertSign; subject O=quicoll, CN=<job>: the job's name is kept here and nowhere else
    ca.key   stays where it was made; no node needs it
    <role>-<node>.pem, .key   one URI `spiffe://quicoll/<job>/<role>/<node>`, clientAuth and serverAuth

Keys are PKCS#8 without a passphrase, readable by their owner alone from the first byte, and are never overwritten: each
file is written beside its place and then linked to it, which fails where a file is already there.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, get_args

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import (
    SECP256R1,
    EllipticCurve,
    EllipticCurvePrivateKey,
    EllipticCurvePublicKey,
    derive_private_key,
    generate_private_key,
)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.security.credentials import (
    AUTHORITY_FILE,
    AUTHORITY_KEY_FILE,
    Credentials,
    PrivateKey,
    node_files,
    read_certificates,
    read_private_key,
)
from quicoll_transport.security.identity import Identity

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = [
    "Authority",
    "Entropy",
    "KeyAlgorithm",
    "PublicKey",
    "create_authority",
    "derive_key",
    "ephemeral",
    "issue",
    "job_of",
]

KeyAlgorithm: TypeAlias = Literal["ed25519", "p256"]
PublicKey: TypeAlias = Ed25519PublicKey | EllipticCurvePublicKey
Entropy: TypeAlias = Callable[[int], bytes]
"""Gives so many random bytes, as `os.urandom` and `random.Random(seed).randbytes` do."""

CLOCK_SKEW = timedelta(minutes=5)
"""Certificates are valid from this long before they are made: the other machine's clock may be behind."""

_ORGANIZATION = "quicoll"
_MAX_DAYS = 100 * 365


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Authority:
    """An authority in memory. `create_authority` and `issue` keep one in a directory.

    Attributes:
        certificate: Its certificate.
        private_key: The key that signs.
    """

    certificate: x509.Certificate
    private_key: PrivateKey = field(repr=False)

    @classmethod
    def create(
        cls,
        *,
        job: str,
        algorithm: KeyAlgorithm = "ed25519",
        days: int = 3650,
        now: datetime | None = None,
        entropy: Entropy | None = None,
    ) -> Self:
        """Make a new authority.

        Args:
            job: The job whose nodes it signs.
            algorithm: Kind of its key and of its nodes' keys.
            days: How long it is valid.
            now: From when, aware; None for the system's clock.
            entropy: For tests and simulations only, see `ephemeral`; no authority in a directory is made with it.
        Raises:
            ConfigurationError: The name of the job, or the time, cannot be used.
        """
        Identity(job, "any", "any")
        now = _now(now)
        key = _new_key(algorithm, entropy)
        subject = _subject(common_name=job)
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(key.public_key())
            .serial_number(_serial(entropy))
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(now + _duration(days))
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(authority=True), critical=True)
            .add_extension(own, critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own), critical=False)
            .sign(key, _digest(key), ecdsa_deterministic=_repeats(key, entropy))
        )
        return cls(certificate, key)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Self:
        """Load the authority that `create_authority` wrote. Raises ConfigurationError, which names the file."""
        path = Path(directory, AUTHORITY_FILE)
        key = read_private_key(Path(directory, AUTHORITY_KEY_FILE))
        # While an authority is being replaced, ca.pem holds the old one too; the key says which of them signs.
        for certificate in read_certificates(path):
            if certificate.public_key() == key.public_key():
                return cls(certificate, key)
        raise ConfigurationError(f"{path}: holds no certificate of the key in {AUTHORITY_KEY_FILE}")

    @property
    def job(self) -> str:
        """The job whose nodes this authority signs. Raises ConfigurationError where its subject names none."""
        return job_of(self.certificate)

    def sign(
        self,
        *,
        role: str,
        node: str,
        days: int = 365,
        dns: Sequence[str] = (),
        ip: Sequence[str] = (),
        now: datetime | None = None,
        entropy: Entropy | None = None,
    ) -> tuple[x509.Certificate, PrivateKey]:
        """Make a certificate and a new key, of the authority's own kind, for one node.

        Args:
            role: The node's role.
            node: Its name.
            days: How long the certificate is valid; at most until the authority itself ends.
            dns: Further names, for tools that read them; quicoll does not.
            ip: Further addresses, likewise.
            now: As in `create`.
            entropy: As in `create`.
        Raises:
            ConfigurationError: A name or the time cannot be used.
        """
        key = _new_key("ed25519" if isinstance(self.private_key, Ed25519PrivateKey) else "p256", entropy)
        certificate = self.certify(
            key.public_key(), role=role, node=node, days=days, dns=dns, ip=ip, now=now, entropy=entropy
        )
        return certificate, key

    def certify(
        self,
        public_key: PublicKey,
        *,
        role: str,
        node: str,
        days: int = 365,
        dns: Sequence[str] = (),
        ip: Sequence[str] = (),
        now: datetime | None = None,
        entropy: Entropy | None = None,
    ) -> x509.Certificate:
        """Make a certificate for a node that keeps its key to itself.

        Args:
            public_key: The node's; that the node holds the other half is proved in every handshake.
            role: As in `sign`, and so are the following.
            node: Likewise.
            days: Likewise.
            dns: Likewise.
            ip: Likewise.
            now: Likewise.
            entropy: Likewise.
        Raises:
            ConfigurationError: A name or the time cannot be used.
        """
        identity = Identity(self.job, role, node)
        now = _now(now)
        end = self.certificate.not_valid_after_utc
        if now >= end:
            raise ConfigurationError(f"the authority of job {self.job!r} expired at {end:%Y-%m-%d %H:%M:%SZ}")
        return (
            x509.CertificateBuilder()
            # With the role as a unit: a node called like its job must not look as if it had signed itself.
            .subject_name(_subject(common_name=node, unit=role))
            .issuer_name(self.certificate.subject)
            .public_key(public_key)
            .serial_number(_serial(entropy))
            .not_valid_before(now - CLOCK_SKEW)
            .not_valid_after(min(now + _duration(days), end))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(authority=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]),
                critical=False,
            )
            .add_extension(x509.SubjectAlternativeName(_names(identity, dns=dns, ip=ip)), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.private_key.public_key()), critical=False
            )
            .sign(
                self.private_key,
                _digest(self.private_key),
                ecdsa_deterministic=_repeats(self.private_key, entropy),
            )
        )

    def __repr__(self) -> str:
        return f"<Authority {self.certificate.subject.rfc4514_string()}>"


def create_authority(
    directory: str | os.PathLike[str],
    *,
    job: str,
    algorithm: KeyAlgorithm = "ed25519",
    days: int = 3650,
    now: datetime | None = None,
) -> Authority:
    """Make `ca.pem` and `ca.key`.

    Args:
        directory: Where; it is made too (mode 0700) when it is missing.
        job: The job whose nodes the authority signs.
        algorithm: Kind of its key and of its nodes' keys.
        days: How long it is valid.
        now: From when, aware; None for the system's clock.
    Raises:
        ConfigurationError: An authority is already there (nothing was changed), or the directory cannot be written.
    """
    authority = Authority.create(job=job, algorithm=algorithm, days=days, now=now)
    try:
        Path(directory).parent.mkdir(parents=True, exist_ok=True)
        Path(directory).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"{os.fsdecode(directory)}: cannot be made: {error.strerror}") from error
    _write_pair(
        Path(directory, AUTHORITY_FILE),
        Path(directory, AUTHORITY_KEY_FILE),
        certificate=authority.certificate,
        private_key=authority.private_key,
    )
    return authority


def issue(
    directory: str | os.PathLike[str],
    *,
    role: str,
    node: str,
    days: int = 365,
    dns: Sequence[str] = (),
    ip: Sequence[str] = (),
    now: datetime | None = None,
) -> Credentials:
    """Make `<role>-<node>.pem` and `.key` beside the authority in `directory`.

    Args:
        directory: Where the authority lies.
        role: As in `Authority.sign`, and so are the following.
        node: Likewise.
        days: Likewise.
        dns: Likewise.
        ip: Likewise.
        now: Likewise.
    Returns:
        The credentials, read back from the files, so they are known to work.
    Raises:
        ConfigurationError: There is no authority, or the node has a key already (nothing was changed).
    """
    authority = Authority.load(directory)
    certificate, key = authority.sign(role=role, node=node, days=days, dns=dns, ip=ip, now=now)
    pem, key_file = node_files(directory, role=role, node=node)
    _write_pair(pem, key_file, certificate=certificate, private_key=key)
    return Credentials.from_directory(directory, role=role, node=node, now=now)


def ephemeral(
    job: str,
    nodes: Iterable[tuple[str, str]],
    *,
    algorithm: KeyAlgorithm = "ed25519",
    days: int = 1,
    now: datetime | None = None,
    entropy: Entropy | None = None,
) -> dict[Identity, Credentials]:
    """Make the credentials of a whole job in memory, for tests, simulations and a cluster inside one process.

    Args:
        job: The job.
        nodes: Pairs of role and node.
        algorithm: Kind of all keys.
        days: How long the certificates are valid.
        now: From when, aware; None for the system's clock.
        entropy: FOR TESTS AND SIMULATIONS ONLY: the source of all keys and serial numbers, so that with the same `now`
            the same bytes come out. Anyone who can repeat it has every key, the authority's too. None for the
            operating system's randomness.
    Returns:
        Credentials by identity, in the order of `nodes`. The authority's key is gone.
    Raises:
        ConfigurationError: A name or the time cannot be used, or a node is named twice.
    """
    now = _now(now)
    authority = Authority.create(job=job, algorithm=algorithm, days=days, now=now, entropy=entropy)
    made: dict[Identity, Credentials] = {}
    for role, node in nodes:
        certificate, key = authority.sign(role=role, node=node, days=days, now=now, entropy=entropy)
        credentials = Credentials.from_parts(certificate, private_key=key, trust=[authority.certificate], now=now)
        if credentials.identity in made:
            raise ConfigurationError(f"{credentials.identity} is named twice")
        made[credentials.identity] = credentials
    return made


def job_of(certificate: x509.Certificate) -> str:
    """Return the job of an authority that `create_authority` made. Raises ConfigurationError for other certificates."""
    subject = certificate.subject
    organizations = [entry.value for entry in subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)]
    units = subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
    names = [entry.value for entry in subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if organizations != [_ORGANIZATION] or units or len(names) != 1:
        raise ConfigurationError(f"not an authority of quicoll: its subject is not O={_ORGANIZATION}, CN=<job>")
    return Identity(str(names[0]), "any", "any").job


def _now(now: datetime | None) -> datetime:
    if now is None:
        return datetime.now(UTC)
    if now.tzinfo is None:
        raise ConfigurationError("now must be an aware datetime: certificates are dated in UTC")
    return now.astimezone(UTC)


def _duration(days: int) -> timedelta:
    if not 1 <= days <= _MAX_DAYS:
        raise ConfigurationError(f"days must be 1 to {_MAX_DAYS}, is {days}")
    return timedelta(days=days)


def derive_key(curve: EllipticCurve, entropy: Entropy) -> EllipticCurvePrivateKey:
    """A private key from drawn bytes; for simulations: of the scalars it takes those below 2**(bits - 1) alone, which
    is below the order of each of the NIST curves (FIPS 186-5; SP 800-186 section 3.2.1)."""
    bits = curve.key_size - 1
    drawn = int.from_bytes(entropy((bits + 7) // 8)) & ((1 << bits) - 1)
    return derive_private_key(max(1, drawn), curve)


def _new_key(algorithm: KeyAlgorithm, entropy: Entropy | None) -> PrivateKey:
    match algorithm:
        case "ed25519":
            return (
                Ed25519PrivateKey.generate() if entropy is None else Ed25519PrivateKey.from_private_bytes(entropy(32))
            )
        case "p256":
            return generate_private_key(SECP256R1()) if entropy is None else derive_key(SECP256R1(), entropy)
        case _:
            raise ConfigurationError(f"algorithm must be one of {', '.join(get_args(KeyAlgorithm))}, is {algorithm!r}")


def _serial(entropy: Entropy | None) -> int:
    """20 octets at most, positive (RFC 5280 section 4.1.2.2)."""
    return x509.random_serial_number() if entropy is None else int.from_bytes(entropy(20)) >> 1 | 1


def _repeats(key: PrivateKey, entropy: Entropy | None) -> bool | None:
    """Return True where a signature has to be that of RFC 6979, else None; Ed25519 always repeats."""
    return None if entropy is None or isinstance(key, Ed25519PrivateKey) else True


def _digest(key: PrivateKey) -> hashes.SHA256 | None:
    # Ed25519 hashes by itself (RFC 8032 section 5.1); ECDSA has to be told.
    return None if isinstance(key, Ed25519PrivateKey) else hashes.SHA256()


def _subject(*, common_name: str, unit: str = "") -> x509.Name:
    names = [(NameOID.ORGANIZATION_NAME, _ORGANIZATION), (NameOID.ORGANIZATIONAL_UNIT_NAME, unit)]
    names.append((NameOID.COMMON_NAME, common_name))
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in names if value])


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _names(identity: Identity, *, dns: Sequence[str], ip: Sequence[str]) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(identity.uri)]
    try:
        names += [x509.DNSName(name) for name in dns]
        names += [x509.IPAddress(ipaddress.ip_address(address)) for address in ip]
    except ValueError as error:
        raise ConfigurationError(f"not a DNS name or an IP address: {error}") from error
    return names


def _write_pair(
    certificate_path: Path, key_path: Path, *, certificate: x509.Certificate, private_key: PrivateKey
) -> None:
    """Both files or neither; a crash between the two leaves the key alone, and the next call says so."""
    for path in (key_path, certificate_path):
        if os.path.lexists(path):
            raise ConfigurationError(f"{path}: is there already and is not overwritten; move it away to make another")
    _write_new(key_path, private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), mode=0o600)
    try:
        _write_new(certificate_path, certificate.public_bytes(Encoding.PEM), mode=0o644)
    except ConfigurationError:
        key_path.unlink()
        raise


def _write_new(path: Path, data: bytes, *, mode: int) -> None:
    """Write a file that is whole as soon as it has its name, and synced; ConfigurationError when the name is taken."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        try:
            # O_EXCL with the final mode: at no moment is there a key that others may open.
            with open(draft, "xb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW, mode)) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            # Not a rename: rename(2) replaces what is there, link(2) refuses.
            os.link(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be written: {error.strerror}") from error
