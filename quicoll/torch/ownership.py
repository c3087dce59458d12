"""Who steps the optimizer and the scheduler of a torch loop: the loop, at the commit, and nobody else while it runs.

An `optimizer.step()` left in a program from before would step a second time, on all ranks alike: no comparison of
digests finds it, and what it changes would stay where the step is aborted. So it is refused before it changes anything.

    free --hold--> held         step() of optimizer and scheduler is refused
    held --release--> free      the program may step them again
    held --changing--> open     the loop's own commit; back to `held` at the block's end

The optimizer is watched by torch's own hook before a step. Schedulers have none, and their `state_dict` has whatever is
set on them: so theirs is refused by their class, for as long as they are held, by one derived from it.

`zero_grad()` changes no parameter and is not watched: before a shard's first backward pass and after the step it does
nothing that was not done already. Where it throws gradients away that are still needed, they are found missing
(quicoll.torch.leaves, quicoll.torch.loop).
"""

from __future__ import annotations

import contextlib
import copyreg
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from quicoll.errors import LocalError

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle

__all__ = ["Ownership"]


class Ownership:
    """See the module's head."""

    def __init__(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        """Take note of what is owned; nothing is held yet.

        Args:
            optimizer: The optimizer.
            scheduler: The scheduler; None without one.
        """
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._hook: RemovableHandle | None = None
        self._class: type | None = None  # the scheduler's own, while it is held
        self._changing = False

    def hold(self) -> None:
        """Refuse from now on that others step them. Again does nothing more."""
        if self._hook is not None:
            return
        self._hook = self._optimizer.register_step_pre_hook(lambda *_: self._demand("optimizer"))
        if self._scheduler is not None:
            self._class = type(self._scheduler)
            self._scheduler.__class__ = _watched(self._class, self._scheduler, lambda: self._demand("scheduler"))

    def release(self) -> None:
        """Let others step them again."""
        if self._hook is None:
            return
        self._hook.remove()
        self._hook = None
        if self._class is not None:
            self._scheduler.__class__, self._class = self._class, None

    @contextlib.contextmanager
    def unless_raised(self) -> Iterator[None]:
        """Release them where the block raises: the program has the error, and may do with them what it will."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Step them in the block."""
        self._changing = True
        try:
            yield
        finally:
            self._changing = False

    def _demand(self, name: str) -> None:
        if not self._changing:
            scaler = " (a GradScaler calls it: use bfloat16, which needs none)" if name == "optimizer" else ""
            raise LocalError(
                f"{name}.step() was called by the program, but Training owns the {name} and steps it when the step is "
                f"committed: remove {name}.step() from the loop{scaler}. The call has changed nothing"
            )


def _watched(its: Any, scheduler: Any, demand: Callable[[], None]) -> Any:
    """A class like a scheduler's, under the same name, whose `step` asks first. Copies are of the scheduler's own."""

    def step(self: Any, *arguments: Any, **options: Any) -> Any:
        if self is scheduler:
            demand()
        return its.step(self, *arguments, **options)

    def reduced(self: Any, protocol: Any) -> Any:
        found = its.__reduce_ex__(self, protocol)
        if not isinstance(found, tuple):
            return found
        call, arguments, *rest = found
        if call is getattr(copyreg, "__newobj__"):  # noqa: B009 # which pickle takes for the object's very class alone
            call = object.__new__
        return call, tuple(its if each is watched else each for each in arguments), *rest

    words = {
        "step": step,
        "__reduce_ex__": reduced,
        "__slots__": (),
        "__module__": its.__module__,
        "__doc__": its.__doc__,
    }
    watched: Any = type(its.__name__, (its,), words)
    return watched
