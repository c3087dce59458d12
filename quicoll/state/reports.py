"""Tell people and programs what became of a rank's state: events (docs/settings.md), and log lines for people."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quicoll.engine.face import EngineFace
    from quicoll.engine.runtime import Runtime
    from quicoll.errors import Diverged
    from quicoll.membership.view import View
    from quicoll.state.learning import Course
    from quicoll.state.rank_state import RankState
    from quicoll.state.synchronisation import Unequal, ViewState

__all__ = ["StateReports"]

log = logging.getLogger("quicoll")


class StateReports:
    """What is told of one rank's state. Events are emitted on the engine's loop."""

    def __init__(self, engine: EngineFace, runtime: Runtime, state: RankState) -> None:
        self._engine = engine
        self._loop = runtime.loop
        self._state = state
        self._torn = False

    def synchronised(self, found: ViewState, view: View) -> None:
        """The ranks' states were compared, and healed where they differed."""
        self._torn = False
        if found.unequal is not None:
            step, unequal = found.version.step, found.unequal
            giver = "" if unequal.giver is None else view.nodes[unequal.giver]
            differing = [view.nodes[rank] for rank in unequal.ranks]
            if step:
                self.emit("state_differs", step=step, nodes=differing, tensor=unequal.tensor, from_node=giver)
            else:
                self.emit("state_handed", step=step, nodes=differing, tensor=unequal.tensor, from_node=giver)
            log.warning("%s; %s gives its own", unequal.text, giver)
        if found.giver is not None:
            self._received(found, found.giver, [view.nodes[rank] for rank in found.confirmed_by])

    def _received(self, found: ViewState, giver: int, confirmed_by: list[str]) -> None:
        version, own = found.version, found.before.step
        self._call(self._engine.state_received, giver, version.step, version.decision, confirmed_by)
        if self._state.own and version != found.before:
            names = [".".join(path) for path in self._state.own]
            self.emit("own_state_kept", names=names, own_step=own, step=version.step)
            log.warning(
                "the state after step %d was handed to this rank; what is its own in it (%s) is as after step %d here",
                version.step,
                ", ".join(names),
                own,
            )

    def learned(self, course: Course, seconds: float, cause: str) -> None:
        """This rank has learned a state outside of views. cause: why no further, "" where it has learned enough."""
        self._torn = True
        self.emit("state_learned", seconds=round(seconds, 3), passes=course.passes, chunks=course.brought, cause=cause)

    def unequal(self, unequal: Unequal, step: int) -> None:
        """States were found to differ while a step was open."""
        log.warning("step %d is not committed: %s", step, unequal.text)

    def diverged(self, error: Diverged) -> None:
        """The ranks hold different states, and nobody knows which is right."""
        self.emit("state_differs", step=error.step, nodes=list(error.nodes), tensor=error.tensor, from_node="")
        log.error("%s", error.message)

    def failed(self, error: BaseException) -> None:
        """States could not be brought together. Tells once of a state that is torn by it."""
        if self._state.torn and not self._torn:
            self._torn = True
            cause = f"{type(error).__name__}: {error}"
            self._call(self._engine.state_torn, self._state.version.step, cause)
            log.warning("this rank's state is half overwritten, and counts as none: %s", cause)

    def emit(self, kind: str, **fields: object) -> None:
        """Give an event to every observer, from the caller's thread."""
        self._call(lambda: self._engine.observers.emit(kind, **fields))

    def _call(self, work: Callable[..., Any], *arguments: Any) -> None:
        self._loop.call_soon_threadsafe(work, *arguments)
