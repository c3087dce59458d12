"""The proof of a peer's identity: certificates in, `Identity` out, or an error with the precise reason.

A node's identity is one URI in its certificate, in the form of an X.509-SVID (SPIFFE, "X.509-SVID" sections 2, 4 and
5): exactly one URI among the subject alternative names, a leaf that is no CA, a key that may sign. TLS 1.3 proves that
the peer holds the certificate's key (RFC 8446 section 4.4.3); this module proves that the certificate is one of ours.
Neither is enough alone, and aioquic does only the first for clients.

Order of the checks in `verify_peer`: the chain up to one of our authorities comes first, and nothing that the
certificate says is read before. So whatever a reason quotes was signed by an authority of ours, and a stranger can
put no text into our logs.

The time is an argument (`now`), so that a simulation or a test decides it.

A certificate that was accepted is remembered, with the authorities and the time within which all of these are valid:
within it nothing but the date could change the answer, as no list of revoked certificates is asked (`Policy` has its
own, which is asked each time). So who comes again costs no signature here. Only what one of our authorities has signed
is remembered, alone and not with what else a peer sends, and of that a bounded number; a refusal never is.
"""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeAlias

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.x509.oid import ExtendedKeyUsageOID
from OpenSSL import crypto

from quicoll_transport.errors import AuthenticationError, ConfigurationError
from quicoll_transport.security.identity import PREFIX, Identity

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["MAX_CHAIN", "UNREADABLE", "format_date", "identity_of", "is_authority", "verify_peer"]

MAX_CHAIN = 4
"""Certificates that a peer may send, its own among them; more are refused before any signature is checked."""

# What cryptography raises, on first access, for extensions and keys that it cannot read.
UNREADABLE = (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType, UnsupportedAlgorithm)

_PURPOSES = ((ExtendedKeyUsageOID.CLIENT_AUTH, "clientAuth"), (ExtendedKeyUsageOID.SERVER_AUTH, "serverAuth"))

# OpenSSL's X509_V_ERR_* (x509_vfy.h), as far as a better sentence than its own can be said.
_NOT_YET_VALID = 9
_EXPIRED = 10
_NO_ISSUER = (18, 19, 20, 21)

_Trusted: TypeAlias = tuple[x509.Certificate, tuple[x509.Certificate, ...]]

_MOST_ACCEPTED = 4096  # a view of a thousand members, and their next certificates
_accepted: dict[_Trusted, tuple[datetime, datetime, Identity]] = {}  # from when and until when, the oldest entry first
_accepted_lock = threading.Lock()


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
    identity = _identity(certificate, tuple(chain), tuple(trust), now.astimezone(UTC))
    if identity.job != job:
        raise AuthenticationError(f"the certificate is for job {identity.job!r}, not {job!r}", peer=identity.node)
    return identity


def _identity(
    certificate: x509.Certificate,
    chain: tuple[x509.Certificate, ...],
    trust: tuple[x509.Certificate, ...],
    now: datetime,
) -> Identity:
    """Return who this certificate proves to be; remembered, see the module's head."""
    key = certificate, trust
    found = None if chain else _accepted.get(key)
    if found is not None and found[0] <= now < found[1]:
        return found[2]
    _verify_chain(certificate, chain, trust=trust, now=now)
    _verify_usage(certificate)
    identity = identity_of(certificate)
    if chain:
        return identity
    since = max(each.not_valid_before_utc for each in (certificate, *trust))
    until = min(each.not_valid_after_utc for each in (certificate, *trust))  # in its last second it is looked at anew
    with _accepted_lock:
        _accepted[key] = since, until, identity
        if len(_accepted) > _MOST_ACCEPTED:
            del _accepted[next(iter(_accepted))]
    return identity


def identity_of(certificate: x509.Certificate) -> Identity:
    """Return the identity that `certificate` claims, unverified. Raises AuthenticationError unless it names one."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    except UNREADABLE as error:
        raise AuthenticationError("the certificate's extensions cannot be read") from error
    if len(uris) != 1:
        raise AuthenticationError(f"the certificate must name exactly one URI ({PREFIX}...), it names {len(uris)}")
    try:
        return Identity.parse(uris[0])
    except ConfigurationError as error:
        raise AuthenticationError(f"the certificate's URI is malformed: {error}") from error


def is_authority(certificate: x509.Certificate) -> bool:
    """Return whether `certificate` says that it may sign others (basicConstraints CA)."""
    try:
        return certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except (x509.ExtensionNotFound, *UNREADABLE):
        return False


def format_date(moment: datetime) -> str:
    """Return a date of a certificate for people."""
    return moment.strftime("%Y-%m-%d %H:%M:%SZ")


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
        return f"{which} expired at {format_date(until)}, now is {format_date(now)}"
    if code == _NOT_YET_VALID:
        since = error.certificate.to_cryptography().not_valid_before_utc
        return f"{which} is not valid before {format_date(since)}, now is {format_date(now)}"
    if code in _NO_ISSUER:
        return f"{which} was not signed by an authority that we trust ({text})"
    return f"the chain of certificates is broken at depth {depth}: {text}"


def _verify_usage(certificate: x509.Certificate) -> None:
    """The leaf's own fitness: a kind of key that we take, no CA, and usable by a node, which both dials and listens."""
    try:
        key = certificate.public_key()
        extensions = certificate.extensions
    except UNREADABLE as error:
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
