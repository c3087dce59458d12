"""The optimizer's state divided between the ranks (ZeRO-1), for a worker: parameters on all ranks, moments on one each.

The axis is all elements of the task's parameters, one tensor after the other, cut into blocks: as many on any number of
ranks. In each step a rank gets the mean gradients of the blocks that it owns, computes their new parameters and moments
block by block, and all ranks get all new parameters:

    reduce_scatter -> update, for each block that is owned -> stage the moments -> all_gather -> at the commit: advance

`update` changes nothing, so an attempt that is aborted leaves no trace; and it sees one block at a time, with the same
bounds on any number of ranks, so the bits do not depend on who owns it. Who owns and keeps what, and how it follows the
ranks: quicoll.state.sharded. In checkpoints each rank writes what it owns, under `divided.NAME`; from there it is read
at the start of a job, by whatever bounds hold then, and by whatever rank has it on its disk (quicoll.state.reading).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import numpy as np

from quicoll.checkpoint.catalogue import manifest_name
from quicoll.checkpoint.manifest import decoded, encoded
from quicoll.checkpoint.parts import Shard
from quicoll.checkpoint.storage import storage_at
from quicoll.checkpoint.store import Stored, stored
from quicoll.errors import CheckpointError, LocalError
from quicoll.numerics.buffers import wrap, zeros
from quicoll.state.sharded import Sharded
from quicoll.train.task import Task

if TYPE_CHECKING:
    from quicoll.checkpoint.parts import Array
    from quicoll.checkpoint.storage import Place
    from quicoll.numerics.buffers import ArrayKind

__all__ = ["Divide", "DivisibleTask", "Moments", "PieceArchive"]

_NAME = "optimizer"
_PREFIX = "divided."
Flat = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Divide:
    """How a worker divides the optimizer's state between the ranks.

    Attributes:
        blocks: Into how many the state is cut, 1 to 65536: at least as many as the job will ever have ranks, and the
            same for all of its life.
        backup: How many further ranks keep a copy of each block, as of the last committed step. With 1, the loss of one
            rank loses nothing; with 0, a rank that is killed takes what it owned along, and the job stops.
    """

    blocks: int = 64
    backup: int = 1


class DivisibleTask(Task, Protocol):
    """A task whose optimizer's state may be divided between the ranks: one that updates element by element.

    The axis has all elements of `parameters()`, each tensor in row-major order, one after the other. `apply` is not
    called then, and `state` has nothing of what is divided.
    """

    def divide(self) -> Mapping[str, str]:
        """Begin to work so. Called once, before any other method but `architecture` and `parameters`, and `forward` and
        `backward` in a rehearsal (`quicoll.train.rehearse`).

        Returns:
            What is kept for each element: element types by name, as `{"m": "float32", "v": "float32"}`. All begin with
            zeros.
        """
        ...

    def update(
        self, start: int, stop: int, average: Flat, moments: Mapping[str, Flat]
    ) -> tuple[Flat, Mapping[str, Flat]]:
        """Compute the next step of elements [start, stop) of the axis, and change nothing.

        Args:
            start: The first element.
            stop: The one after the last.
            average: Their mean gradients, as for `apply`.
            moments: What is kept for them, after the last committed step. Not to be written.
        Returns:
            Their new values, for `advance`, and what is kept for them then, by the same names.
        """
        ...

    def advance(self, values: Sequence[Array]) -> None:
        """Take new parameters. Called only for committed steps, in the place of `apply`.

        Args:
            values: What `update` returned on all ranks; kinds, shapes and order as `parameters` returns them.
        """
        ...


class PieceArchive:
    """A divided state in checkpoints: each rank writes what it owns, and reads it by whatever bounds hold then."""

    def __init__(self, prefix: str, directory: Place | None, kind: ArrayKind = "numpy") -> None:
        """Say where it is.

        Args:
            prefix: What names of its pieces begin with there.
            directory: Where checkpoints are; None: nowhere.
            kind: Of what is read.
        """
        self._prefix = prefix
        self._directory = directory
        self._kind: ArrayKind = kind
        self._open: Stored | None = None
        self._looked: int | None = None  # the step whose checkpoint was looked for last

    def parts(self, sharded: Sharded) -> dict[str, Shard]:
        """Return what this rank writes of a state in a checkpoint.

        Args:
            sharded: The state.
        """
        spec, mine = sharded.pieces.spec, sharded.mine
        if mine.start == mine.stop:
            return {}
        return {f"{self._prefix}{name}": Shard(sharded[name], (spec.length,), (mine.start,)) for name in spec.dtypes}

    def read(self, sharded: Sharded, step: int, name: str, start: int, stop: int) -> Any:
        """Read elements as they are after a step: zeros at the start, else from the checkpoint of that step.

        Args:
            sharded: The state.
            step: After which.
            name: Of the piece.
            start: The first element.
            stop: The one after the last.
        Returns:
            The elements.
        Raises:
            CheckpointError: There is no such checkpoint, or it is damaged.
        """
        if not step:
            dtype = sharded.pieces.spec.dtypes[name]
            return wrap(zeros(stop - start, dtype), dtype, (stop - start,), self._kind)
        if self._directory is None:
            raise CheckpointError("no directory of checkpoints is given")
        found = self._found(step)
        if found is None:
            raise CheckpointError(f"there is no checkpoint of step {step}", path=str(self._directory))
        return found.read(f"{self._prefix}{name}", offset=(start,), shape=(stop - start,))

    def _found(self, step: int, *, anew: bool = False) -> Stored | None:
        if self._directory is not None and (anew or self._looked != step):
            here = stored(self._directory)
            self._open = next((each for each in here if each.step == step), None)
            self._looked = step
        return self._open

    # -- quicoll.state.sharded.PieceIndex ------------------------------------------------------------------------------

    def of_step(self, step: int) -> bytes | None:
        """Return the manifest of the checkpoint of a step; None where this rank's disk has none."""
        try:
            found = self._found(step, anew=True)
        except CheckpointError:
            return None
        return None if found is None else encoded(found.manifest)

    def take(self, step: int, index: bytes) -> None:
        """Read a checkpoint of which this rank's disk has files, but no manifest: the job was killed as it was written.

        Args:
            step: Of the checkpoint.
            index: The manifest that another rank's disk has.
        Raises:
            CheckpointError: It is no manifest, or of another step.
        """
        manifest = decoded(index)
        if manifest.step != step:
            raise CheckpointError(f"the manifest that came is of step {manifest.step}, not {step}")
        if self._directory is not None:
            storage = storage_at(self._directory)
            self._open = Stored(storage.path(manifest_name(step)), manifest, storage)
            self._looked = step


class Moments:
    """What a worker does with a state that is divided.

    Attributes:
        task: Its task.
        sharded: The state.
    """

    def __init__(self, task: Task, divide: Divide, size: int, directory: Place | None) -> None:
        """Declare it.

        Args:
            task: What is trained.
            divide: How it is divided.
            size: Elements of the axis.
            directory: Where checkpoints are; None: nowhere.
        Raises:
            LocalError: The task has no such methods, or keeps nothing for its elements; or `divide` cannot be.
        """
        if not _divisible(task):
            raise LocalError(
                f"{type(task).__name__} has no divide, update and advance: see quicoll.train.DivisibleTask"
            )
        self.task: DivisibleTask = task
        pieces = dict(task.divide())
        if not pieces:
            raise LocalError(f"{type(task).__name__} keeps no state for its parameters: there is nothing to divide")
        self.sharded = Sharded(size, pieces, blocks=divide.blocks, backup=divide.backup, read=self._read)
        self._names = list(pieces)
        self._archive = self.sharded.index = PieceArchive(_PREFIX, directory)

    @property
    def named(self) -> dict[str, Sharded]:
        """The state, for `Job.register_state`."""
        return {_NAME: self.sharded}

    @property
    def text(self) -> str:
        """What has to be the same on all ranks."""
        return self.sharded.pieces.spec.text

    def update(self, average: Any) -> tuple[Flat, dict[str, Flat]]:
        """Compute the next step of what this rank owns.

        Args:
            average: Its mean gradients.
        Returns:
            New values, and what is kept for them.
        Raises:
            LocalError: The task returned something else than it has to.
        """
        held = {name: np.asarray(self.sharded[name]) for name in self._names}
        gradients, first = np.asarray(average), self.sharded.mine.start
        values = np.empty_like(gradients)
        kept = {name: np.empty_like(each) for name, each in held.items()}
        for block in self.sharded.pieces.owned:
            start, stop = self.sharded.pieces.spec.bounds(range(block, block + 1))
            if start == stop:
                continue
            at = slice(start - first, stop - first)
            new, moments = self.task.update(start, stop, gradients[at], {name: held[name][at] for name in held})
            if new.shape != (stop - start,) or sorted(moments) != sorted(kept):
                raise LocalError(
                    f"update({start}, {stop}, ...) of {type(self.task).__name__} returned {new.shape} values and "
                    f"{', '.join(moments) or 'nothing'} for {', '.join(kept)}"
                )
            values[at] = new
            for name, each in kept.items():
                each[at] = moments[name]
        return values, kept

    def parts(self) -> dict[str, Shard]:
        """Return what this rank writes of it in a checkpoint."""
        return self._archive.parts(self.sharded)

    def _read(self, step: int, name: str, start: int, stop: int) -> Any:
        return self._archive.read(self.sharded, step, name, start, stop)


def _divisible(task: Task) -> TypeGuard[DivisibleTask]:
    return all(callable(getattr(task, name, None)) for name in ("divide", "update", "advance"))
