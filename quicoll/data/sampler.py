"""Which samples a step uses, so that each is used once in an epoch: through any world sizes, aborts and restarts.

    sampler = quicoll.data.Sampler(len(images), batch_size=64, shards=8, seed=job.seed)

    async with job.step() as step:
        shards = job.group.shards(sampler.shards)
        leaves = [gradient(images[part.indices]) * part.weight for part in sampler.take(step, shards)]

States. A sampler has one: its position, the next step that the data has. It belongs to the job's state like the
weights: `state` is in what the program's `save` gives, `load_state` in its `load`.

    at p --take, the step is committed--> at p + 1     by `step.on_commit`, beside the weights' own update
    at p --take, the step is aborted----> at p         nothing has moved: the next attempt takes the same again
    at p --load_state-------------------> where the state is: a rank that was away, a checkpoint

Invariants.
1. The position moves in no other place than a callback of a committed step. So weights and position are of the same
   step on every rank, in every checkpoint, and in whatever is handed to a rank that joins.
2. What is taken is a function of (seed, position, shards). So the steps that were committed, in whichever views and on
   however many ranks, have used the places of each epoch one after the other: each sample once.
3. Several `take` in one step give consecutive steps of the data; all of them count at the commit, or none.

Failures.
- A step in doubt: its callbacks run before the next step begins, or never (quicoll.step.protocol); so does the move.
- Data that is no longer the same (length, batch size, shards, order): `load_state` refuses it and names what differs.
  A rank that joins with other data fails by itself, before it takes part in a step; the others go on.
- A job that starts again with another seed, as where a coordinator has lost its journal and drew a new one: the seed is
  part of the state, so an epoch that was begun is ended in its own order.
- A step without `take`: the data does not move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from quicoll.checks import whole
from quicoll.data.order import EpochOrder
from quicoll.data.portions import Division, Position
from quicoll.errors import LocalError
from quicoll.numerics.seed import Seed

if TYPE_CHECKING:
    from quicoll.collectives.shards import Shards
    from quicoll.data.portions import Portion

__all__ = ["OpenStep", "Sampler"]


class OpenStep(Protocol):
    """What a sampler needs of a step: `quicoll.Step`, or its blocking mirror."""

    def on_commit(self, callback: Callable[[], None]) -> None:
        """Run a function if, and only if, the step is committed."""
        ...


class Sampler:
    """See the module's head. Not thread-safe: use it where the job is used."""

    def __init__(
        self,
        length: int,
        *,
        batch_size: int,
        shards: int,
        seed: Seed | int,
        shuffle: bool = True,
        drop_last: bool = False,
        name: str = "",
    ) -> None:
        """Make a sampler that stands at the begin of the first epoch. Every rank makes the same.

        Args:
            length: The number of samples in the data set, 1 to 2**60.
            batch_size: Samples of one step on all ranks together; a multiple of `shards`.
            shards: Logical shards of a step, for `job.group.shards`; more than there will ever be ranks.
            seed: `job.seed`, or a seed of one's own that is equal on all ranks.
            shuffle: Whether each epoch has an order of its own, from (seed, name, epoch). False: the samples' own.
            drop_last: Leave out an epoch's last step where it has fewer samples than the others. False: no sample is
                left out.
            name: Tells several samplers of a job apart: each name has orders of its own.
        Raises:
            LocalError: The samples cannot be divided so.
        """
        self._division = Division(
            whole(length, "the number of samples"),
            whole(batch_size, "the batch size"),
            whole(shards, "the number of shards"),
            bool(drop_last),
        )
        self._shuffle = bool(shuffle)
        self._name = name
        self._seed = seed if isinstance(seed, Seed) else Seed(seed)
        self._position = Position()
        self._attempt: OpenStep | None = None  # that took last, and where the next `take` in it stands
        self._next = self._position
        self._order: tuple[Seed, int, EpochOrder] | None = None  # of the epoch that was asked for last

    def __repr__(self) -> str:
        return f"<Sampler epoch={self.epoch} step={self._position.step} of {self.steps}>"

    @property
    def position(self) -> Position:
        """The next step of the data that is not committed."""
        return self._position

    @property
    def epoch(self) -> int:
        """The number of epochs that are over."""
        return self._position.epoch

    @property
    def steps(self) -> int:
        """The number of steps in an epoch."""
        return self._division.steps

    @property
    def shards(self) -> int:
        """The number of logical shards of a step."""
        return self._division.shards

    @property
    def seed(self) -> Seed:
        """The seed of the orders: the one that the data was begun with, also where the job has another one now."""
        return self._seed

    def samples(self, position: Position) -> int:
        """Return the number of samples in a step, on all ranks together.

        Args:
            position: The step.
        Returns:
            The batch size, or what is left in the last step of an epoch.
        """
        return self._division.samples(position.step)

    # -- in a step -----------------------------------------------------------------------------------------------

    def take(self, step: OpenStep, shards: Shards) -> tuple[Portion, ...]:
        """Take this rank's samples of the next step of the data. Counts if, and only if, the step is committed.

        Args:
            step: The open step.
            shards: `job.group.shards(sampler.shards)`, asked for in this step.
        Returns:
            One portion for each of this rank's shards, in their order.
        Raises:
            LocalError: The shards are not of so many, or the step has been left.
        """
        return self.portions(self.reserve(step, shards), shards)

    def reserve(self, step: OpenStep, shards: Shards) -> Position:
        """Do as `take`, without computing which samples they are; for those who have them already.

        Args:
            step: The open step.
            shards: As in `take`.
        Returns:
            The position whose samples are this step's.
        Raises:
            LocalError: As `take`.
        """
        self._demand(shards)
        position = self._next if step is self._attempt else self._position
        self.advance(step, self._division.after(position))
        return position

    def advance(self, step: OpenStep, position: Position) -> None:
        """Let the data stand elsewhere, if the step is committed; for those who look ahead with `portions`.

        Args:
            step: The open step.
            position: What `after` returned for the last step of the data that was used.
        Raises:
            LocalError: The step has been left.
        """
        step.on_commit(lambda: self._move(position))
        self._attempt, self._next = step, position

    def portions(self, position: Position, shards: Shards, *more: Shards) -> tuple[Portion, ...]:
        """Return what some shards have in a step of the data. Nothing moves.

        Args:
            position: The step.
            shards: The shards.
            more: Further runs of them.
        Returns:
            One portion for each shard, in their order.
        Raises:
            LocalError: The shards are not of so many.
        """
        runs = (shards, *more)
        for run in runs:
            self._demand(run)
        order, divide = self._order_of(position.epoch), self._division.portions
        return tuple(part for run in runs for part in divide(order, position.step, run.first, run.count))

    def after(self, position: Position) -> Position:
        """Return the position one step further.

        Args:
            position: A step.
        Returns:
            The next one, of the next epoch after an epoch's last.
        """
        return self._division.after(position)

    def _demand(self, shards: Shards) -> None:
        if shards.total != self.shards:
            raise LocalError(f"this data has {self.shards} shards, not {shards.total}: job.group.shards({self.shards})")

    def _move(self, position: Position) -> None:
        self._position = position

    def _order_of(self, epoch: int) -> EpochOrder:
        if self._order is None or self._order[:2] != (self._seed, epoch):
            seed = self._seed.derive("data", self._name, "epoch", epoch) if self._shuffle else None
            self._order = self._seed, epoch, EpochOrder(self._division.length, seed)
        return self._order[2]

    # -- as part of a state ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, int | str]:
        """Return the position, and what has to be the same wherever it is loaded: a part of the job's state."""
        return {
            "epoch": self._position.epoch,
            "step": self._position.step,
            "seed": int(self._seed),
            **self._terms(),
        }

    def _terms(self) -> dict[str, int | str]:
        division = self._division
        return {
            "length": division.length,
            "batch_size": division.batch,
            "shards": division.shards,
            "shuffle": int(self._shuffle),
            "drop_last": int(division.drop_last),
            "name": self._name,
        }

    def demand_same(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of other data than this.

        Args:
            state: What `state` returned, here or elsewhere.
        Raises:
            LocalError: It is of other data, and says in what; or it is no such state.
        """
        mine = self._terms()
        for key in ("epoch", "step", "seed", *mine):
            if key not in state:
                raise LocalError(f"this is no state of a sampler: it has no {key!r}")
        changed = [f"{key} is {mine[key]!r} here and was {state[key]!r}" for key in mine if state[key] != mine[key]]
        if changed:
            raise LocalError(
                "the data is not the one that this job has begun with, so its samples would be missed or used twice: "
                + "; ".join(changed)
            )
        epoch, step = whole(state["epoch"], "an epoch"), whole(state["step"], "a step of the data")
        if epoch < 0 or not 0 <= step < self.steps:
            raise LocalError(f"there is no step {step} in epoch {epoch} of this data, which has {self.steps} steps")

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take over a state.

        Args:
            state: What `state` returned, on another rank or before a restart.
        Raises:
            LocalError: It is of other data than this (see `demand_same`). Nothing has changed.
        """
        self.demand_same(state)
        self._seed = Seed(state["seed"])
        self._position = Position(int(state["epoch"]), int(state["step"]))
        self._attempt = None
