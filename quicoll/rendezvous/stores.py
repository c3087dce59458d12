"""Where the ranks of a launch leave each other words before they have a connection: torchrun's store, or a directory.

Neither has a lock or an order. `set` replaces a value as a whole; `get` never waits. Both may hold words of an earlier
launch; `meeting` tells those apart. Values are a few KiB; a longer one is not looked at.

Whom a store trusts is who can write to it. torchrun's asks nobody who he is: anyone who can open a TCP connection to
MASTER_PORT may write. A directory is as safe as its permissions: it has to be this user's, and nobody else's to write.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from quicoll.errors import LocalError, PeerError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["DirectoryStore", "GivenStore", "Store", "TorchStore"]

MAX_VALUE = 64 << 10
_SERVERS: list[Any] = []
"""Stores that this process serves to others, which would end with the last reference."""


class Store(Protocol):
    """Values by name, which are text. Used by one thread at a time."""

    def set(self, key: str, value: bytes) -> None:
        """Leave a value, in place of an earlier one. Raises PeerError or LocalError where it cannot be left."""
        ...

    def get(self, key: str) -> bytes | None:
        """Return a value, None where there is none. Raises PeerError or LocalError where it cannot be asked for."""
        ...

    def clear(self) -> None:
        """Take away what was left, as far as the store can."""
        ...


class DirectoryStore:
    """A directory below one that all ranks share.

    Who may write to the shared one may put another directory in the place of ours. So whose it is, is looked at each
    time that it is opened, and words are found by that descriptor.
    """

    def __init__(self, base: str | os.PathLike[str], name: str) -> None:
        """Make the directory if it is not there.

        Args:
            base: The shared one.
            name: Of the launch.
        Raises:
            LocalError: It cannot be made, or others may write to it.
        """
        self._directory = Path(base) / f"quicoll-{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:100]}"
        self._make()

    def _make(self) -> None:
        try:
            self._directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._directory.mkdir(mode=0o700, exist_ok=True)
            with self._opened():
                pass
        except OSError as error:
            raise LocalError(
                f"rendezvous: {self._directory} cannot be made: {error.strerror}; name a directory that all nodes "
                "share and that you may write to"
            ) from error

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Hold the directory, by its descriptor. Opening it has NFS look whether it has changed."""
        unsafe = LocalError(
            f"rendezvous: who may write to {self._directory} may join the job; it has to be a directory of yours "
            "alone (chmod 700 it, or remove it)"
        )
        try:
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise unsafe from None
            raise
        try:
            found = os.fstat(directory)
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
                raise unsafe
            yield directory
        finally:
            os.close(directory)

    def set(self, key: str, value: bytes) -> None:
        """See Store."""
        name = _file(key)
        draft = f".{name}.{secrets.token_hex(8)}"
        for last in (False, True):
            try:
                with self._opened() as directory:
                    created = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
                    with open(created, "wb") as file:
                        file.write(value)
                        file.flush()
                        os.fsync(file.fileno())
                    os.replace(draft, name, src_dir_fd=directory, dst_dir_fd=directory)
                return
            except FileNotFoundError:  # another rank has cleared what an earlier meeting left
                if last:
                    raise LocalError(f"rendezvous: {self._directory} was removed") from None
                self._make()
            except OSError as error:
                raise LocalError(f"rendezvous: {self._directory / name} cannot be written: {error.strerror}") from error

    def get(self, key: str) -> bytes | None:
        """See Store."""
        name = _file(key)
        try:
            with self._opened() as directory:
                # Asking for the list first, else NFS may answer from memory that there is no such file.
                if name not in os.listdir(directory):
                    return None
                with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=directory), "rb") as file:
                    value = file.read(MAX_VALUE + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise LocalError(f"rendezvous: {self._directory / name} cannot be read: {error.strerror}") from error
        return value if len(value) <= MAX_VALUE else None

    def clear(self) -> None:
        """See Store."""
        with contextlib.suppress(OSError, LocalError):
            with self._opened() as directory:
                for name in os.listdir(directory):
                    os.unlink(name, dir_fd=directory)
            self._directory.rmdir()


class GivenStore:
    """A store of torch's that a program has: a TCPStore, a FileStore, or one with a prefix."""

    def __init__(self, store: Any, where: str, prefix: str) -> None:
        """Use it.

        Args:
            store: The store.
            where: What it is, for errors.
            prefix: Of all keys.
        """
        self._store, self._where, self._prefix = store, where, prefix

    def set(self, key: str, value: bytes) -> None:
        """See Store."""
        try:
            self._store.set(self._prefix + key, value.decode())
        except RuntimeError as error:
            raise PeerError(f"rendezvous: {self._where} is gone: {_first_line(error)}") from error

    def get(self, key: str) -> bytes | None:
        """See Store."""
        try:
            if not self._store.check([self._prefix + key]):
                return None
            value = bytes(self._store.get(self._prefix + key))
        except RuntimeError as error:
            raise PeerError(f"rendezvous: {self._where} is gone: {_first_line(error)}") from error
        return value if len(value) <= MAX_VALUE else None

    def count(self, key: str) -> int:
        """Count a number up, from none, and return it: of all who do, one gets 1. Raises PeerError as `get` does."""
        try:
            return int(self._store.add(self._prefix + key, 1))
        except RuntimeError as error:
            raise PeerError(f"rendezvous: {self._where} is gone: {_first_line(error)}") from error

    def clear(self) -> None:
        """See Store. The store ends with the job."""


class TorchStore(GivenStore):
    """torchrun's TCPStore, at MASTER_ADDR and MASTER_PORT."""

    def __init__(self, environ: Mapping[str, str], *, timeout: float) -> None:
        """Connect. Where the agent serves no store, rank 0 does, as `torch.distributed` would.

        Args:
            environ: With torchrun's variables.
            timeout: Seconds until the connection is there.
        Raises:
            LocalError: There is no torch, or a variable is malformed.
            PeerError: The store cannot be reached.
        """
        host = environ["MASTER_ADDR"]
        try:
            port, rank = int(environ["MASTER_PORT"]), int(environ["RANK"])
        except ValueError as error:
            raise LocalError(f"rendezvous: MASTER_PORT and RANK are whole numbers: {error}") from error
        try:
            from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though not in its __all__
        except ImportError as error:
            raise LocalError(
                "rendezvous: torchrun's store needs torch in this environment; install it, or set coordinator and certs"
            ) from error
        where = f"torchrun's store at {host}:{port}"
        serves = environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True) and rank == 0
        try:
            store = TCPStore(
                host,
                port,
                is_master=serves,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (RuntimeError, ValueError) as error:
            raise PeerError(f"rendezvous: {where} cannot be reached: {_first_line(error)}") from error
        if serves:
            _SERVERS.append(store)
        super().__init__(store, where, f"quicoll/{environ['TORCHELASTIC_RUN_ID']}/")


def _file(key: str) -> str:
    return key.replace("/", "+")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
