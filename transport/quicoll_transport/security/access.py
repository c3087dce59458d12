"""What a node's files say of it and of others, read at its start and again while it runs.

Certificates expire and keys are stolen while a job runs, so both files may be exchanged below a living endpoint:

    credentials   certificate, key and authorities of a directory, as `quicoll certs` writes them
    deny list     SHA-256 fingerprints of certificates that may not come in, one a line, "#" before a comment

`Access.read` reads them and touches nothing else; `AccessControl.renew` puts them to use. Files that cannot be used are
refused as a whole: then the endpoint goes on with what it has.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from quicoll_transport.errors import ConfigurationError
from quicoll_transport.security.credentials import Credentials
from quicoll_transport.security.policy import parse_fingerprint

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quicoll_transport.security.policy import Policy

__all__ = ["Access", "AccessControl", "read_deny_list"]

_MAX_DENY_LIST = 4 << 20  # 60,000 fingerprints; the bound is there for a path that names something else


@dataclass(frozen=True, slots=True)
class Access:
    """What the files held when they were read.

    Attributes:
        credentials: Of the node itself.
        denied: Fingerprints of its deny list, in plain form.
    """

    credentials: Credentials
    denied: tuple[str, ...] = ()

    @classmethod
    def read(
        cls,
        directory: str | os.PathLike[str],
        *,
        role: str,
        node: str,
        deny: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Read a node's files.

        Args:
            directory: Of `ca.pem`, `<role>-<node>.pem` and `<role>-<node>.key`.
            role: The node's role.
            node: The node's name.
            deny: Its deny list; None for none.
        Raises:
            ConfigurationError: A file cannot be read or used; the text names it.
        """
        denied = () if deny is None else read_deny_list(deny)
        return cls(Credentials.from_directory(directory, role=role, node=node), denied)


def read_deny_list(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return the fingerprints of a deny list, in plain form and in order, each once.

    Args:
        path: A text file: one fingerprint a line, as `openssl x509 -fingerprint -sha256` or `Credentials.fingerprint`
            has it; blank lines and what follows a "#" are skipped.
    Raises:
        ConfigurationError: The file cannot be read, or a line is no fingerprint; the text names the line. A typing
            error must not leave a stolen key at work.
    """
    name = os.fsdecode(path)
    try:
        with open(path, "rb", opener=lambda file, flags: os.open(file, flags | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigurationError(f"{name}: is not a regular file")  # an empty FIFO would deny nobody
            data = file.read(_MAX_DENY_LIST + 1)
    except OSError as error:
        raise ConfigurationError(f"{name}: cannot be read: {error.strerror}") from error
    if len(data) > _MAX_DENY_LIST:
        raise ConfigurationError(f"{name}: is larger than {_MAX_DENY_LIST} bytes, so it is no deny list")
    found: dict[str, None] = {}
    for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
        entry = line.partition("#")[0].strip()
        if entry:
            try:
                found[parse_fingerprint(entry)] = None
            except ConfigurationError as error:
                raise ConfigurationError(f"{name}, line {number}: {error}") from error
    return tuple(found)


class _Endpoint(Protocol):
    """What is asked of an endpoint."""

    def rotate(self, credentials: Credentials) -> None: ...
    def deny(self, fingerprint: str) -> None: ...


class AccessControl:
    """Keeps one endpoint in step with its files. Runs on the endpoint's loop.

    A fingerprint is denied for one of two reasons, and stays so until neither holds: it is on the list, or `deny` was
    called for it.
    """

    def __init__(self, endpoint: _Endpoint, policy: Policy, *, listed: Iterable[str] = ()) -> None:
        """Take over an endpoint.

        Args:
            endpoint: The endpoint.
            policy: Its `authorize`.
            listed: Fingerprints of the deny list that the policy was made with.
        """
        self._endpoint = endpoint
        self._policy = policy
        self._listed = tuple(listed)
        self._by_call: dict[str, None] = {}

    def deny(self, fingerprint: str) -> str:
        """Shut a certificate out, whatever the list says; its links end at once.

        Returns:
            The fingerprint in plain form.
        Raises:
            ConfigurationError: It is no fingerprint.
        """
        plain = parse_fingerprint(fingerprint)
        self._by_call[plain] = None
        self._endpoint.deny(plain)
        return plain

    def renew(self, access: Access) -> tuple[str, ...]:
        """Put what was read to use: new handshakes show the new certificate, links of newly denied ones end.

        Returns:
            The fingerprints that are denied from now on and were not before.
        Raises:
            ConfigurationError: The certificate names another identity than the endpoint's. Nothing has changed.
            EndpointClosed: The endpoint is closed.
        """
        endpoint = self._endpoint
        endpoint.rotate(access.credentials)  # first: it refuses, and then nothing may have changed
        before = self._policy.denied
        new = tuple(one for one in access.denied if one not in before)
        for fingerprint in new:
            endpoint.deny(fingerprint)
        for fingerprint in self._listed:
            if fingerprint not in access.denied and fingerprint not in self._by_call:
                self._policy.forgive(fingerprint)
        self._listed = access.denied
        return new
