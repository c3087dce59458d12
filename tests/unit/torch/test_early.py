"""Gradients that are handed over while a backward pass goes on: in order, once, and only when they are complete."""

from __future__ import annotations

import pytest
import torch

from quicoll.errors import LocalError
from quicoll.torch.early import EarlyGradients, cut_early

KIB = 1 << 10


def sized(*kib: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(each * KIB // dtype.itemsize, dtype=dtype) for each in kib]


def test_buckets_are_cut_from_the_last_parameter_on_and_what_fills_none_is_left() -> None:
    assert cut_early(sized(1, 2, 3, 4, 5), 6 * KIB) == [[4, 3], [2, 1, 0]]
    assert cut_early(sized(1, 2, 3, 4, 5), 7 * KIB) == [[4, 3]]
    assert cut_early(sized(1, 9, 1), 2 * KIB) == [[2, 1]]
    assert cut_early(sized(1, 2), 0) == []


def test_a_bucket_has_one_dtype() -> None:
    mixed = [*sized(1, 1), *sized(1, 1, dtype=torch.bfloat16)]
    assert cut_early([mixed[place] for place in (0, 2, 1, 3)], 2 * KIB) == [[3, 1], [2, 0]]


class Bench:
    """A chain of layers, each multiplying by its parameter, so that the last one has its gradient first."""

    def __init__(self, buckets: list[list[int]], weight: float = 1.0) -> None:
        self.parameters = {f"layer{number}": torch.nn.Parameter(torch.full((2,), number + 2.0)) for number in range(4)}
        self.issued: list[tuple[int, list[list[float]]]] = []
        self.early = EarlyGradients(self.parameters, buckets, self.issue, weight=weight)

    def issue(self, number: int, gradients: list[torch.Tensor]) -> None:
        self.issued.append((number, [each.tolist() for each in gradients]))

    def loss(self, *names: int) -> torch.Tensor:
        product = torch.ones(2)
        for name in names:
            product = product * self.parameters[f"layer{name}"]
        return product.sum()

    def backward(self, *names: int) -> None:
        self.loss(*names).backward()


def test_a_bucket_is_handed_over_when_its_last_gradient_is_there_and_is_no_ones_else() -> None:
    bench = Bench([[3], [2, 1]])
    bench.backward(0, 1, 2, 3)
    assert bench.issued == [(0, [[24.0, 24.0]]), (1, [[30.0, 30.0], [40.0, 40.0]])]
    assert bench.early.issued == 2
    grads = [value.grad for value in bench.parameters.values()]
    assert grads[1:] == [None, None, None]
    assert grads[0] is not None


def test_a_bucket_waits_for_the_one_before_it() -> None:
    bench = Bench([[0], [3]])
    bench.backward(3)
    assert bench.issued == []
    bench.backward(0)
    assert [number for number, _ in bench.issued] == [0, 1]


def test_gradients_are_weighted_as_they_are_handed_over() -> None:
    bench = Bench([[3]], weight=0.5)
    bench.backward(0, 1, 2, 3)
    assert bench.issued == [(0, [[12.0, 12.0]])]
    assert bench.parameters["layer2"].grad is not None
    assert bench.parameters["layer2"].grad.tolist() == [30.0, 30.0]


def test_passes_that_are_not_the_last_add_up_before() -> None:
    bench = Bench([[3]])
    bench.early.paused = True
    bench.backward(3)
    assert bench.issued == []
    bench.early.paused = False
    bench.backward(3)
    assert bench.issued == [(0, [[2.0, 2.0]])]


def test_a_gradient_that_comes_again_after_it_was_sent_is_an_error_that_names_it() -> None:
    bench = Bench([[3]])
    bench.backward(3)
    with pytest.raises(LocalError, match="layer3 came again"):
        bench.backward(3)


def test_a_gradient_without_fixed_bits_is_refused_by_name() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    EarlyGradients({"table": table.weight}, [[0]], lambda number, gradients: None)
    with pytest.raises(LocalError, match="gradient of table is torch"):
        table(torch.tensor([1])).sum().backward()


def test_nothing_is_watched_when_it_is_over() -> None:
    bench = Bench([[3]])
    bench.early.over()
    bench.backward(3)
    assert bench.issued == []
    assert bench.parameters["layer3"].grad is not None
