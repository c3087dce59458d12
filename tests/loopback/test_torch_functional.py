"""Gradients through collectives, against plain torch on the tensors of all ranks. Three ranks are threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch_ranks import Ranks, torch_ranks  # noqa: E402 - after the check that there is a torch

import quicoll  # noqa: E402 - likewise
from quicoll.torch import functional  # noqa: E402 - likewise

WORLD = 3
ROWS = [2, 0, 3]  # of each rank, where ranks differ

Inputs = list[Any]


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with torch_ranks(WORLD, timeout=60.0) as made:
        yield made


def given(shapes: list[tuple[int, ...]]) -> Inputs:
    return [
        torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        for rank, shape in enumerate(shapes)
    ]


def loss_of(y: Any, rank: int) -> Any:
    """Another one on each rank, with a gradient that depends on y."""
    weights = torch.linspace(0.5, 2.0, y.numel(), dtype=y.dtype).reshape(y.shape)
    return ((rank + 1) * weights * torch.sin(y)).sum()


def gradients(loss: Any, x: Any) -> list[Any]:
    """The gradient, and that of its squares' sum: what goes through twice."""
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    return [first.detach(), second]


def check(ranks: Ranks, xs: Inputs, ours: Callable[[Any, Any, int], Any], plain: Callable[[Inputs], list[Any]]) -> None:
    """`ours` on each rank gives what `plain` gives of all ranks' tensors, and has its gradients."""

    def one(_: Any, rank: int) -> tuple[Any, list[Any]]:
        x = xs[rank].clone().requires_grad_()
        y = ours(x, ranks.jobs[rank].group, rank)
        return y.detach(), gradients(loss_of(y, rank), x)

    found = ranks.all(one)
    leaves = [x.clone().requires_grad_() for x in xs]
    ys = plain(leaves)
    total = torch.stack([loss_of(y, rank) for rank, y in enumerate(ys)]).sum()
    firsts = torch.autograd.grad(total, leaves, create_graph=True)
    seconds = torch.autograd.grad(torch.stack([(first**2).sum() for first in firsts]).sum(), leaves)
    for rank, (y, (first, second)) in enumerate(found):
        torch.testing.assert_close(y, ys[rank].detach())
        torch.testing.assert_close(first, firsts[rank].detach())
        torch.testing.assert_close(second, seconds[rank])


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_all_reduce(ranks: Ranks, op: Any) -> None:
    def plain(xs: Inputs) -> list[Any]:
        return [torch.stack(xs).sum(0) / (WORLD if op == "avg" else 1)] * WORLD

    check(ranks, given([(4, 2)] * WORLD), lambda x, group, _: functional.all_reduce(x, group, op=op), plain)


@pytest.mark.parametrize("counts", [None, ROWS])
def test_all_gather_of_uneven_parts(ranks: Ranks, counts: list[int] | None) -> None:
    check(
        ranks,
        given([(2, rows, 3) for rows in ROWS]),
        lambda x, group, _: functional.all_gather(x, group, dim=1, counts=counts),
        lambda xs: [torch.cat(xs, 1)] * WORLD,
    )


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("counts", [None, [1, 5, 0]])
def test_reduce_scatter(ranks: Ranks, counts: list[int] | None, op: Any) -> None:
    def plain(xs: Inputs) -> list[Any]:
        total = torch.stack(xs).sum(0) / (WORLD if op == "avg" else 1)
        return list(torch.split(total, counts or [2, 2, 2], -1))

    check(
        ranks,
        given([(2, 6)] * WORLD),
        lambda x, group, _: functional.reduce_scatter(x, group, dim=-1, counts=counts, op=op),
        plain,
    )


def test_all_to_all_with_other_counts_on_each_rank(ranks: Ranks) -> None:
    counts = [[1, 0, 2], [0, 0, 1], [3, 1, 0]]
    arrived = [[row[rank] for row in counts] for rank in range(WORLD)]

    def ours(x: Any, group: Any, rank: int) -> Any:
        y, came = functional.all_to_all(x, group, counts=counts[rank])
        assert came == arrived[rank]
        return y

    def plain(xs: Inputs) -> list[Any]:
        parts = [torch.split(x, row) for x, row in zip(xs, counts, strict=True)]
        return [torch.cat([part[rank] for part in parts]) for rank in range(WORLD)]

    check(ranks, given([(sum(row), 2) for row in counts]), ours, plain)


def test_broadcast(ranks: Ranks) -> None:
    check(
        ranks,
        given([(3,)] * WORLD),
        lambda x, group, _: functional.broadcast(x, group, root=1),
        lambda xs: [xs[1] + 0.0 * torch.stack(xs).sum(0)] * WORLD,
    )


def test_a_layer_divided_between_enter_and_leave_has_the_gradients_of_the_whole_one(ranks: Ranks) -> None:
    """Columns of the first weight and rows of the second on each rank, one loss that all ranks compute alike."""
    (x,), (first, second) = given([(5, 4)]), given([(4, 6), (6, 2)])

    def plain() -> list[Any]:
        leaves = [each.clone().requires_grad_() for each in (x, first, second)]
        y = torch.tanh(leaves[0] @ leaves[1]) @ leaves[2]
        return [y.detach(), *torch.autograd.grad((y**2).sum(), leaves)]

    def divided(_: Any, rank: int) -> list[Any]:
        part, group = slice(2 * rank, 2 * rank + 2), ranks.jobs[rank].group
        leaves = [each.clone().requires_grad_() for each in (x, first[:, part], second[part])]
        y = functional.leave(torch.tanh(functional.enter(leaves[0], group) @ leaves[1]) @ leaves[2], group)
        return [y.detach(), *torch.autograd.grad((y**2).sum(), leaves)]

    y, for_x, for_first, for_second = plain()
    for rank, found in enumerate(ranks.all(divided)):
        part = slice(2 * rank, 2 * rank + 2)
        for got, wanted in zip(found, (y, for_x, for_first[:, part], for_second[part]), strict=True):
            torch.testing.assert_close(got, wanted)


def test_gradients_have_the_bits_of_the_groups_own_operations(ranks: Ranks) -> None:
    xs = [x.float() for x in given([(1000,)] * WORLD)]

    def ours(_: Any, rank: int) -> Any:
        x = xs[rank].clone().requires_grad_()
        (functional.all_reduce(x, ranks.jobs[rank].group) * xs[rank]).sum().backward()
        return x.grad

    wanted = (xs[0] + xs[1]) + xs[2]
    for found in ranks.all(ours):
        assert torch.equal(found, wanted)


def test_a_backward_pass_may_compute_a_forward_pass_again(ranks: Ranks) -> None:
    """With its collectives, as activation checkpointing does."""
    from torch.utils.checkpoint import checkpoint

    xs = given([(4,)] * WORLD)

    def ours(_: Any, rank: int) -> list[Any]:
        found = []
        for again in (False, True):
            x = xs[rank].clone().requires_grad_()

            def layer(value: Any) -> Any:
                return torch.sin(functional.all_reduce(value, ranks.jobs[rank].group))

            y = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
            loss_of(y, rank).backward()
            found.append(x.grad)
        return found

    for plain, again in ranks.all(ours):
        assert torch.equal(plain, again)


def test_what_cannot_be_is_refused_before_anything_is_sent(ranks: Ranks) -> None:
    group = ranks.jobs[0].group
    x = torch.ones(4)
    for call, words in [
        (lambda: functional.all_reduce(x, group, op="max"), "not through 'max'"),
        (lambda: functional.reduce_scatter(x, group, op="min"), "not through 'min'"),
        (lambda: functional.reduce_scatter(x, group), "no equal parts"),
        (lambda: functional.reduce_scatter(x, group, counts=[1, 1, 1]), "counts are 3 in all"),
        (lambda: functional.all_gather(x, group, counts=[3, 4, 4]), "counts say 3"),
        (lambda: functional.all_gather(x, group, counts=[4, 4]), "one for each of the 3 ranks"),
        (lambda: functional.all_to_all(x, group, counts=[4, 1, -1]), "none negative"),
        (lambda: functional.all_to_all(x, group, counts=[1, 1, 1]), "there are 4 rows"),
        (lambda: functional.all_reduce(x, "group"), "a str is no group"),
        (lambda: functional.all_reduce(x), "no group of quicoll's"),
    ]:
        with pytest.raises(quicoll.LocalError, match=words):
            call()
