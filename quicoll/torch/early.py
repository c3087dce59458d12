"""Gradients that travel while the backward pass goes on: buckets of a leaf, each reduced when its gradients are there.

What is reduced together is fixed by the model and `bucket_bytes`: the parameters from the last to the first, which is
about the order in which a backward pass reaches them, cut where a bucket of one dtype is full (Li et al. 2020, "PyTorch
Distributed", 3.2.3). What is left when all are placed, and all else of a leaf, is reduced when the step is. So every
rank issues the same collectives in the same order, whenever its gradients are there; one that computes nothing as well.

States of an `EarlyGradients`, which belongs to the last shard of a rank in one step:

    watching --a parameter's gradient is there--> watching     buckets that are complete, in order, are issued
    watching --over--> over                                    no parameter is watched; what was issued stands

Invariants.
1. Bucket k is issued after bucket k - 1, by whichever thread completes it.
2. A gradient that was handed over is the bucket's own: the parameter has none any more. So nothing that comes later
   changes what is sent.
3. The result does not depend on `bucket_bytes`: an element of the mean depends on the elements of the leaves alone.

Failures: a gradient that comes once more after it was handed over (a second backward pass, a part of the model that is
differentiated again within one) cannot be added any more: LocalError by the parameter's name, and the step is aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from quicoll.errors import LocalError

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

__all__ = ["EarlyGradients", "cut_early", "sparse_gradient"]


def cut_early(values: Sequence[torch.Tensor], bucket_bytes: int) -> list[list[int]]:
    """Place parameters in buckets that are full.

    Args:
        values: The parameters, in the order of a leaf.
        bucket_bytes: A bucket is full when it has so many bytes; 0: none is made.
    Returns:
        The numbers of each bucket's parameters, in the order in which the buckets are issued. Parameters in none are
        those that come first in the model, less than a bucket of each dtype.
    """
    full: list[list[int]] = []
    if not bucket_bytes:
        return full
    open_buckets: dict[torch.dtype, list[int]] = {}
    for number in reversed(range(len(values))):
        dtype = values[number].dtype
        bucket = open_buckets.setdefault(dtype, [])
        bucket.append(number)
        if sum(values[each].nbytes for each in bucket) >= bucket_bytes:
            full.append(open_buckets.pop(dtype))
    return full


class EarlyGradients:
    """See the module's head."""

    def __init__(
        self,
        parameters: dict[str, torch.nn.Parameter],
        buckets: Sequence[Sequence[int]],
        issue: Callable[[int, list[torch.Tensor]], None],
        *,
        weight: float = 1.0,
    ) -> None:
        """Watch parameters.

        Args:
            parameters: By name, in the order of a leaf.
            buckets: As `cut_early` gives them.
            issue: Called with (number, gradients) for each bucket, in order, by the thread that completes it.
            weight: Gradients are multiplied by it.
        """
        self.handed: dict[int, torch.Tensor] = {}
        self.paused = False
        self._names = list(parameters)
        self._parameters = list(parameters.values())
        self._buckets = buckets
        self._issue = issue
        self._weight = weight
        self._lock = threading.RLock()
        self._ready: dict[int, None] = {}
        self._next = 0
        watched = [number for bucket in buckets for number in bucket]
        self._hooks: list[RemovableHandle] = [self._watch(number) for number in watched]

    @property
    def issued(self) -> int:
        """How many buckets are under way."""
        return self._next

    def over(self) -> None:
        """Watch no longer."""
        while self._hooks:
            self._hooks.pop().remove()

    def _watch(self, number: int) -> RemovableHandle:
        def there(_: torch.Tensor) -> None:
            if not self.paused:
                self._there(number)

        register: Callable[..., RemovableHandle] = self._parameters[number].register_post_accumulate_grad_hook
        return register(there)

    def _there(self, number: int) -> None:
        with self._lock:
            if number in self.handed:
                raise LocalError(
                    f"the gradient of {self._names[number]} came again after its bucket was sent: with bucket_bytes "
                    "all but the last backward() of a shard say more=True, and no part of the model is differentiated "
                    "twice in the last"
                )
            self._ready[number] = None
            while self._next < len(self._buckets) and all(each in self._ready for each in self._buckets[self._next]):
                bucket = self._buckets[self._next]
                self._next += 1
                self._issue(self._next - 1, [self._hand_over(each) for each in bucket])

    def _hand_over(self, number: int) -> torch.Tensor:
        parameter = self._parameters[number]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            raise LocalError(f"the gradient of {self._names[number]} was taken away in the backward pass")
        if gradient.layout != torch.strided:
            raise sparse_gradient(self._names[number], gradient)
        if self._weight != 1.0:
            gradient.mul_(self._weight)
        self.handed[number] = gradient
        return gradient


def sparse_gradient(name: str, gradient: torch.Tensor) -> LocalError:
    """The error for a gradient that cannot be a part of a leaf."""
    return LocalError(f"the gradient of {name} is {gradient.layout}: sparse gradients have no fixed bits")
