"""Credentials as a process of this program's own is told them, over the line that the two share, and nowhere else."""

from __future__ import annotations

from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_der_private_key,
)

from quicoll.lanes.orders import Shown
from quicoll_transport.security.credentials import Credentials

__all__ = ["credentials_shown", "shown"]


def shown(credentials: Credentials) -> Shown:
    """Return credentials as they are told."""
    certificates = (credentials.certificate, *credentials.chain, *credentials.trust)
    key = credentials.private_key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    return Shown(tuple(each.public_bytes(Encoding.DER) for each in certificates), len(credentials.chain), key)


def credentials_shown(told: Shown) -> Credentials:
    """Return the credentials that were told."""
    own, *others = [x509.load_der_x509_certificate(each) for each in told.certificates]
    key = load_der_private_key(told.key, password=None)
    return Credentials.from_parts(
        own,
        private_key=key,  # type: ignore[arg-type]  # of a kind that `Credentials` has, or it is refused
        chain=others[: told.chained],
        trust=others[told.chained :],
    )
