"""What a user's loop most often does wrong, seen while it runs, and said where a run of it fails.

    changed early    a tensor of the registered state is another one at the vote than at the step's entry. A step that
                     is aborted leaves it changed, on this rank and not on others
    its own          what was changed so differs from rank to rank: a buffer that each rank makes of its own data, as
                     the running statistics of a batch norm
    beyond the seed  the same seed gave another run: the real clock, or chance that no seed decides

These are hints and no invariants: a loop may change a tensor early and set it back itself. Digests alone are kept.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["BEYOND_THE_SEED", "Habits"]

BEYOND_THE_SEED = (
    "This story is of a second run with the same seed, and it went otherwise than the first: the test depends on "
    "something beyond its seed. Most often that is chance without a seed (random.Random(), numpy's default_rng() or "
    "a torch.Generator that is given none: draw from job.seed), else the real clock (a name imported before, as in "
    "`from time import time`), state that is kept between runs, the order of a set, or an address in an error's text."
)


class Habits:
    """What the ranks of one run do with their state inside their steps."""

    def __init__(self) -> None:
        self._early: dict[str, tuple[str, int]] = {}  # by tensor: on which node first, in which step
        self._own: dict[str, tuple[str, str]] = {}  # by tensor: two nodes whose values differ
        self._changed: dict[tuple[int, int, str], tuple[str, bytes]] = {}  # by view, index and tensor: who, and what

    def changed(self, node: str, view_id: int, index: int, step: int, tensors: Mapping[str, bytes]) -> None:
        """Take in which tensors a rank has changed inside a step, each with its digest at the vote."""
        for name, digest in tensors.items():
            self._early.setdefault(name, (node, step))
            first, found = self._changed.setdefault((view_id, index, name), (node, digest))
            if found != digest:
                self._own.setdefault(name, (first, node))

    def hints(self) -> list[str]:
        """Return what may explain a failure, the likeliest first."""
        found = [
            f"Hint: {name!r} of the registered state was changed inside a step, and {one} and {other} changed it "
            "differently: a buffer that each rank makes of its own data (a batch norm's running statistics). Reduce it "
            "over the group and assign it in step.on_commit, or leave it out of the state."
            for name, (one, other) in self._own.items()
        ]
        found += [
            f"Hint: {name!r} of the registered state was changed inside step {step} on {node}, before the commit. "
            "Where the step is aborted, the change stays, and the next attempt begins from another state. Change state "
            "in step.on_commit only."
            for name, (node, step) in self._early.items()
            if name not in self._own
        ]
        return found[:3]
