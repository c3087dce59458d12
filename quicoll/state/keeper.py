"""One rank's state in the course of a job: made one with the others' when a view begins, compared beside steps.

    synchronised    when a view begins, and on demand: all ranks' states are compared and made one
    checked         beside a step's body: at the entry of the view's second step (what makes ranks differ mostly does so
                    at once), and of each step before which `check_every` were committed since the last comparison
    diverged        the ranks hold different states and nobody knows which is right. For good: no step begins any more

Invariant: whether a step is checked is the same on all ranks of a view. It depends on `check_every`, which is agreed
when the view begins, and on the step after which states were last found equal. All ranks compare when their view
begins; within it, a step that is not committed on all ranks ends it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quicoll.errors import Diverged
from quicoll.state.reports import StateReports
from quicoll.state.synchronisation import StateCheck, synchronise

if TYPE_CHECKING:
    from quicoll.collectives.group import Group
    from quicoll.engine.engine import Engine
    from quicoll.engine.runtime import Runtime
    from quicoll.membership.view import View
    from quicoll.state.rank_state import RankState
    from quicoll.state.synchronisation import Unequal

__all__ = ["StateKeeper"]


class StateKeeper:
    """See the module's head."""

    def __init__(self, engine: Engine, runtime: Runtime, state: RankState, group: Group, *, check_every: int) -> None:
        """Keep a state that has been compared with nobody's.

        Args:
            engine: The rank's engine, which emits events.
            runtime: The loop on which the engine lives.
            state: What this rank holds.
            group: All ranks of the present view, with operations numbered apart from the user's.
            check_every: Committed steps from one comparison to the next; 0: only when a view begins.
        """
        self._state = state
        self._group = group
        self._reports = StateReports(engine, runtime, state)
        self._own_check_every = check_every
        self._check_every = 0  # as all ranks of the view have it
        self._compared = 0  # the step after which states were last found equal
        self._first = True  # the next check is the first one of its view
        self._digest = b""
        self._diverged: Diverged | None = None

    @property
    def digest(self) -> bytes:
        """Of the state that all ranks had when it was compared last; b"" where this one registered none."""
        return self._digest

    def demand_one_state(self) -> None:
        """Raise Diverged where the ranks have diverged."""
        if self._diverged is not None:
            raise self._diverged

    async def synchronise(self, view: View) -> None:
        """Bring every rank of a view to the newest state that any of them holds, and to one state.

        Raises:
            QuicollError: As `quicoll.state.synchronisation.synchronise`.
        """
        try:
            found = await synchronise(
                self._state,
                self._group,
                nodes=view.nodes,
                view_id=view.view_id,
                check_every=self._own_check_every,
            )
        except Diverged as error:
            self._diverged = error
            self._reports.diverged(error)
            raise
        except BaseException as error:
            self._reports.failed(error)
            raise
        self._check_every, self._digest = found.check_every, found.digest
        self._compared, self._first = self._state.version.step, True
        self._reports.synchronised(found, view)

    def begin_check(self) -> StateCheck | None:
        """Begin to compare states beside the step that is about to begin, if it is time.

        Here states are at rest: no code of the user can run.

        Raises:
            LocalError: What `save` returned is no state.
        """
        every = min(self._check_every, 1) if self._first else self._check_every
        if not every or self._state.version.step - self._compared < every:
            return None
        return StateCheck(self._state, self._group)

    async def end_check(self, check: StateCheck, view: View, step: int) -> Unequal | None:
        """Wait for a comparison.

        Args:
            check: What `begin_check` gave at the step's entry.
            view: The step's.
            step: Its number.
        Returns:
            In what states differ; None where they do not.
        Raises:
            Corrupted: A rank was told something else than the others.
            PeerError: A rank was lost.
        """
        unequal = await check.result(view.nodes, view.view_id)
        if unequal is None:
            self._compared, self._first = step - 1, False
        else:
            self._reports.unequal(unequal, step)
        return unequal
