"""The settings that a rank has in common with its coordinator: what it insists on, and what it takes from there.

lost_after      all ranks and the coordinator hold the same: a rank that does not set it takes the coordinator's
                (quicoll.deadlines); there is no view before it has
hold_timeout    of each rank alone; yet a wait for a decision that is shorter than the coordinator's for its votes
                ends in doubt where nothing is wrong. A rank that does not set it waits longer than the coordinator,
                and one that sets it is warned
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quicoll.config import Config

__all__ = ["DECISION_MARGIN_S", "CommonSettings"]

log = logging.getLogger("quicoll")

DECISION_MARGIN_S = 30.0
"""By how much the wait for a decision outlasts the coordinator's for its votes."""


class CommonSettings:
    """See the module's head.

    config: the settings of this rank, as they are now.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._warned = False

    def insisted(self, name: str) -> int | None:
        """Return the nanoseconds of a setting that was set; None where it has its default."""
        return None if self.config.sources[name] == "default" else round(getattr(self.config, name) * 1e9)

    def adopt_lost_after(self, lost_after_ns: int) -> None:
        """Take the coordinator's."""
        self._take("lost_after", lost_after_ns / 1e9)

    def heed_vote_timeout(self, vote_timeout_ns: int) -> None:
        """Outlast the coordinator's wait for votes with `hold_timeout`, or say once why it does not."""
        hold, votes = self.config.hold_timeout, vote_timeout_ns / 1e9
        if hold > votes:
            return
        if self.config.sources["hold_timeout"] == "default":
            self._take("hold_timeout", votes + DECISION_MARGIN_S)
        elif not self._warned:
            self._warned = True
            log.warning(
                "%s: hold_timeout is %g s, and the coordinator waits %g s for votes (--vote-timeout): a step that is "
                "decided later than hold_timeout is in doubt here until the next one begins",
                self.config.node,
                hold,
                votes,
            )

    def _take(self, name: str, seconds: float) -> None:
        sources = {**self.config.sources, name: "coordinator"}
        # By name, which a type checker cannot follow; each of the names is of a setting in seconds.
        self.config = replace(self.config, **{name: seconds, "sources": sources})  # type: ignore[arg-type]
