"""What one rank holds: the version of its state, and the functions of the user that read and write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from quicoll.checks import plain
from quicoll.state.version import StateVersion

__all__ = ["Load", "RankState", "Save"]

Save = Callable[[], Mapping[str, Any]]
"""Return the state of this rank: names and tensors."""
Load = Callable[[Mapping[str, Any]], None]
"""Put a state in the place of this rank's."""


class RankState:
    """What one rank holds: the version of its state, and the user's functions that read and write it."""

    def __init__(self) -> None:
        self.version = StateVersion()
        self.save: Save | None = None
        self.load: Load | None = None

    def register(self, save: Save, load: Load) -> None:
        """Take the functions that read and write the state.

        Raises:
            LocalError: One of them is no plain function.
        """
        self.save = plain(save, "save")
        self.load = plain(load, "load")
