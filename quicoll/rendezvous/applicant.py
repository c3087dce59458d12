"""A node that has its certificate from somebody else, and keeps its key to itself.

    Applicant                                        who has the authority
    a key of its own, in memory
    `public_key`, its name             ------------>  `certify_node`: whoever asks gets one, so ask who he is
    `accept`: checked, three files     <------------  its certificate, the authority's

On the way nothing is secret. Who can change it can give the node another authority, and so another job.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
)

from quicoll.errors import LocalError
from quicoll_transport.errors import TransportError
from quicoll_transport.security.credentials import AUTHORITY_FILE, Credentials, PrivateKey, node_files
from quicoll_transport.security.identity import WORKER

if TYPE_CHECKING:
    from quicoll_transport.security.authority import Authority

__all__ = ["Applicant", "certificate_pem", "certify_node", "key_pem", "write_credentials"]

_DAYS = 30


class Applicant:
    """Asks for the certificate of one worker.

    Attributes:
        public_key: In PEM, for `certify_node`.
    """

    def __init__(self, *, job: str, node: str) -> None:
        """Make a key.

        Args:
            job: The job.
            node: The worker's name.
        """
        self._job = job
        self._node = node
        self._key = Ed25519PrivateKey.generate()
        public = self._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        self.public_key = public.decode()

    def accept(self, directory: Path, *, authority: str, certificate: str) -> None:
        """Write the three files that `certs` (QUICOLL_CERTS) names.

        Args:
            directory: Where; an empty one of this user's alone, as `tempfile.mkdtemp` makes it.
            authority: The authority's certificate, in PEM.
            certificate: What `certify_node` has returned.
        Raises:
            LocalError: They do not fit the key, each other, or this job and node. Nothing was written.
        """
        try:
            issuer = x509.load_pem_x509_certificate(authority.encode())
            own = x509.load_pem_x509_certificate(certificate.encode())
            found = Credentials.from_parts(own, private_key=self._key, trust=[issuer]).identity
        except (ValueError, TransportError) as error:
            raise LocalError(f"the certificate cannot be used: {error}") from error
        if (found.job, found.role, found.node) != (self._job, WORKER, self._node):
            raise LocalError(
                f"the certificate is for {found.role} {found.node!r} of the job {found.job!r}, and this is "
                f"{self._node!r} of {self._job!r}; give all ranks one job (QUICOLL_JOB)"
            )
        write_credentials(
            directory, role=WORKER, node=self._node, authority=certificate_pem(issuer),
            certificate=certificate_pem(own), key=key_pem(self._key),
        )  # fmt: skip


def certify_node(authority: Authority, *, public_key: str, node: str, days: int = _DAYS) -> str:
    """Make a worker's certificate.

    Args:
        authority: Who signs it.
        public_key: The worker's, `Applicant.public_key`.
        node: Its name.
        days: How long it is valid.
    Returns:
        The certificate, in PEM.
    Raises:
        LocalError: What it asks for cannot be signed.
    """
    try:
        key = load_pem_public_key(public_key.encode())
        if not isinstance(key, Ed25519PublicKey):
            raise ValueError("a key of another kind")
        return certificate_pem(authority.certify(key, role=WORKER, node=node, days=days))
    except (ValueError, TransportError) as error:
        raise LocalError(f"what {node!r} asks for cannot be signed: {error}") from error


def write_credentials(directory: Path, *, role: str, node: str, authority: str, certificate: str, key: str) -> None:
    """Write the three files of a node; the key is its owner's alone from the first byte.

    Args:
        directory: Where; an empty one of this user's alone.
        role: The node's role.
        node: Its name.
        authority: PEM of the authority's certificate.
        certificate: PEM of the node's.
        key: PEM of its key.
    """
    certificate_file, key_file = node_files(directory, role=role, node=node)
    for path, text, mode in (
        (directory / AUTHORITY_FILE, authority, 0o644),
        (certificate_file, certificate, 0o644),
        (key_file, key, 0o600),
    ):
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
            file.write(text)


def certificate_pem(certificate: x509.Certificate) -> str:
    """Return a certificate in PEM."""
    return certificate.public_bytes(Encoding.PEM).decode()


def key_pem(key: PrivateKey) -> str:
    """Return a private key in PEM, without a passphrase."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
