"""The set of tiers in force on this rank, and its part in the agreement on the next one: `job.tiers`.

quicoll.tiers.agreement has the rules. Here is what is called: proposals, the exchanges inside of a step, who hears of a
change and when. The set is a part of the job's registered state, like the weights: so a rank that joins or was behind
has it before its first step, a checkpoint has it, and a comparison of states finds a rank that holds another one.

    tiers.propose(...)      kept here until a step with `agree` is committed
    await tiers.agree(step) exchanges; what is chosen takes effect by `step.on_commit`
    commit                  `current` is the new set; then the callbacks of `on_change`, before the step's context ends
    load_state              the same, for a rank that is handed the state: before its first step

The exchanges have a group of their own, with numbers of their own: `agree` may run beside other collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from quicoll.checks import done, plain
from quicoll.errors import LocalError
from quicoll.tiers.agreement import MAX_REASON, TierBallot, TierChoice, TierVerdict, choose_tiers, refusals
from quicoll.tiers.telling import exchanged
from quicoll.tiers.tier_set import TierSet

if TYPE_CHECKING:
    from quicoll.collectives.group import Group
    from quicoll.membership.view import View
    from quicoll.tiers.shared import CommittingStep

__all__ = ["Tiers"]


class Tiers:
    """The tiers of a job on one rank; see the module's head. `Job.tiers` is one. Not thread-safe."""

    def __init__(self, group: Group, view: Callable[[], View], emit: Callable[..., None]) -> None:
        self._group = group
        self._view = view
        self._emit = emit
        self._current = TierSet()
        self._told = self._current  # to all callbacks of `on_change`; another one than `current` where one has raised
        self._pending: TierSet | None = None
        self._weigh: Callable[[TierSet], str] = lambda proposed: ""
        self._changed: list[Callable[[TierSet, TierSet], None]] = []

    def __repr__(self) -> str:
        return f"<Tiers {self._current!r}>"

    @property
    def current(self) -> TierSet:
        """The set in force; version 0, without tiers, until the job has agreed on one."""
        return self._current

    @property
    def pending(self) -> TierSet | None:
        """What this rank has proposed and nothing is decided of; None: nothing."""
        return self._pending

    def propose(self, tier_set: TierSet) -> None:
        """Propose the next set, on any rank, at any time. It takes the place of what this rank proposed before.

        It is brought into the next step in which the ranks call `agree`, and comes into force when that is committed.
        If that is aborted, it is proposed again in the next one. If it is refused, the event "tiers_refused" says why.

        Args:
            tier_set: The set; `job.tiers.current.changed(...)` gives one.
        Raises:
            LocalError: It is no set, or not the next version.
        """
        if not isinstance(tier_set, TierSet):
            raise LocalError(f"a TierSet is proposed, not a {type(tier_set).__name__}")
        if tier_set.version != self._current.version + 1:
            raise LocalError(
                f"version {self._current.version} is in force, so the next set is version {self._current.version + 1}, "
                f"not {tier_set.version}: job.tiers.current.changed(...) makes it"
            )
        self._pending = tier_set

    def on_change(self, callback: Callable[[TierSet, TierSet], None]) -> None:
        """Have a function called with (before, after) each time another set comes into force here.

        At the end of the step that was committed with it, before the step's context is left; on a rank that is handed
        the state, by `load_state`. In both cases before this rank begins the next step. If it raises, this rank's state
        counts as half changed; all functions are called again when it is handed the state.

        Args:
            callback: A plain function.
        Raises:
            LocalError: It is none.
        """
        self._changed.append(plain(callback, "a callback of on_change"))

    def weigh(self, callback: Callable[[TierSet], str]) -> None:
        """Have a function asked whether this rank can go over to a set, before it is voted on.

        Args:
            callback: Gets the set; returns "" where this rank can, else why not. Then the set is refused on all ranks.
                A plain function; it changes nothing, because the step may be aborted.
        Raises:
            LocalError: It is no plain function.
        """
        self._weigh = plain(callback, "the function of weigh")

    async def agree(self, step: CommittingStep) -> TierSet:
        """Agree on the next set of tiers, if any rank has proposed one. Every rank calls it, once, in the same step.

        It is one small collective, and a second one where there is a proposal.

        Args:
            step: The open step.
        Returns:
            The set that will be in force when this step is committed, the same on all ranks.
        Raises:
            LocalError: The ranks hold different sets; or the step has been left.
            QuicollError: As any collective.
        """
        view, current = self._view(), self._current
        mine = TierBallot(current.digest, current.version, b"" if self._pending is None else self._pending.encoded)
        ballots = await exchanged(self._group, mine, view=view, what="a set of tiers")
        choice = choose_tiers(current, ballots, view)
        if choice.chosen is not None:
            verdict = TierVerdict(self._reason(choice.chosen))
            verdicts = await exchanged(self._group, verdict, view=view, what="a set of tiers")
            choice = refusals(choice, verdicts, view)
        if choice.chosen is not None or choice.refused:
            step.on_commit(partial(self._decided, choice, view))
        return current if choice.chosen is None else choice.chosen

    def _reason(self, proposed: TierSet) -> str:
        try:
            reason: object = self._weigh(proposed)
        except Exception as error:  # whatever it is: a rank that cannot say that it can, cannot
            reason = f"{type(error).__name__}: {error}"
        text = reason if isinstance(reason, str) else f"weigh returned {reason!r}, not text"
        return text.encode(errors="replace").decode()[:MAX_REASON]

    def _decided(self, choice: TierChoice, view: View) -> None:
        """The step was committed: go over to what was chosen, and forget what was refused."""
        for each in choice.refused:
            if each.tier_set == self._pending:
                self._pending = None
            nodes = [view.nodes[rank] for rank in each.ranks]
            self._emit("tiers_refused", version=each.tier_set.version, nodes=nodes, reason=each.reason)
        if choice.chosen is not None:
            self._go_over(choice.chosen)

    def _go_over(self, after: TierSet) -> None:
        late, before, self._current = self._pending, self._told, after
        if late is not None and late.version <= after.version:
            self._pending = None
            if late != after:  # proposed here since the ranks agreed, or while this rank was away
                reason = f"version {after.version} came into force first"
                self._emit("tiers_refused", version=late.version, nodes=[], reason=reason)
        if before == after:
            return
        self._emit("tiers_changed", version=after.version, active=list(after.active), cold=list(after.cold))
        for callback in self._changed:
            done(callback(before, after), "a callback of on_change")
        self._told = after

    # -- as part of a state --------------------------------------------------------------------------------------

    def state(self) -> dict[str, bytes]:
        """Return the set in force: a part of the job's state, for the `save` of `register_state`."""
        return {"tier_set": self._current.encoded}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over a set, in the `load` of `register_state`, and from a checkpoint.

        Args:
            state: What `state` returned, on another rank or before a restart.
        Raises:
            LocalError: It is none. Nothing has changed.
        """
        encoded = state.get("tier_set")
        if not isinstance(encoded, bytes):
            raise LocalError("this is no state of tiers: it has no 'tier_set' of bytes")
        self._go_over(TierSet.decode(encoded))
