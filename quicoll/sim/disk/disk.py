"""The disk of a simulated machine: a file system that fails as disks do, with SQLite on it.

`filesystem` says what is durable, what crashes and faults do, and where all randomness and time come from.
"""

from __future__ import annotations

from pathlib import Path

from quicoll.sim.disk.filesystem import FileSystem
from quicoll.sim.disk.sqlite import SimConnection

__all__ = ["SimDisk"]


class SimDisk(FileSystem):
    """A `quicoll.checkpoint.disk.Disk` in memory that can hold SQLite databases; see `FileSystem`."""

    def connect(self, path: Path) -> SimConnection:
        """Open a SQLite database, as `quicoll.membership.journal.connect_sqlite` does on the real disk.

        Args:
            path: The database's file; made when it is not there.
        Raises:
            LocalError: apsw, the wrapper of SQLite through which its files can be replaced, is not installed.
        """
        self.check_up()
        return SimConnection(self, path)
