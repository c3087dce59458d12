"""Experts on one to four ranks, which are threads, against all of them in one place."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the check that there is a torch
from torch_ranks import torch_ranks  # noqa: E402 - likewise

from quicoll.errors import LocalError  # noqa: E402 - likewise
from quicoll.torch.experts import Experts, top_k  # noqa: E402 - likewise

TOKENS, WIDTH, TOTAL, K = 24, 6, 5, 2


def given() -> tuple[Any, Any, list[Any]]:
    torch.manual_seed(1)
    x, scores = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, TOTAL)
    scores[::3, 2] = scores[::3].max(dim=1).values  # ties
    scores[:, 4] = -10.0  # an expert that nobody wants
    experts = [nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in range(TOTAL)]
    return x, scores, experts


def loss_of(y: Any, begin: int) -> Any:
    weights = torch.linspace(0.5, 1.5, TOKENS)[begin : begin + len(y), None]
    return (weights * y.square()).sum()


def dense() -> list[Any]:
    """Every expert computes every token; what was not chosen counts as nothing."""
    x, scores, experts = given()
    x.requires_grad_()
    scores.requires_grad_()
    y = torch.zeros(TOKENS, WIDTH)
    best = [sorted(range(TOTAL), key=lambda e, row=row: (-row[e], e))[:K] for row in scores.tolist()]
    mask = torch.full((TOKENS, TOTAL), float("-inf"))
    for token, chosen in enumerate(best):
        mask[token, chosen] = 0.0
    shares = torch.softmax(scores + mask, dim=1)
    for expert, layer in enumerate(experts):
        y = y + shares[:, expert : expert + 1] * layer(x)
    loss_of(y, 0).backward()
    return [y.detach(), x.grad, scores.grad, [[p.grad for p in layer.parameters()] for layer in experts]]


def divided(world: int) -> list[Any]:
    with torch_ranks(world, timeout=60.0) as ranks:
        x, scores, experts = given()
        tokens = [TOKENS // 2, *[0] * (world - 2), TOKENS - TOKENS // 2] if world > 1 else [TOKENS]

        def one(_: Any, rank: int) -> tuple[Any, ...]:
            begin, end = sum(tokens[:rank]), sum(tokens[: rank + 1])
            mine, own = x[begin:end].clone().requires_grad_(), scores[begin:end].clone().requires_grad_()
            layer = Experts(experts, ranks.jobs[rank].group, k=K)
            y = layer(mine, own)
            loss_of(y, begin).backward()
            return y.detach(), mine.grad, own.grad, [[p.grad for p in expert.parameters()] for expert in layer.mine]

        found = ranks.all(one)
    together = [torch.cat([each[place] for each in found]) for place in range(3)]
    return [*together, [gradients for each in found for gradients in each[3]]]


def flattened(found: list[Any]) -> list[Any]:
    return [*found[:3], *(each for gradients in found[3] for each in gradients if each is not None)]


def test_outputs_and_gradients_are_those_of_the_dense_mixture() -> None:
    wanted = dense()
    wanted[3][4] = [None] * 4 if all(not each.any() for each in wanted[3][4]) else wanted[3][4]
    found = divided(3)
    found[3][4] = [None] * 4 if all(each is None or not each.any() for each in found[3][4]) else found[3][4]
    for got, expected in zip(flattened(found), flattened(wanted), strict=True):
        torch.testing.assert_close(got, expected)


def test_the_bits_are_the_same_on_any_number_of_ranks() -> None:
    alone = flattened(divided(1))
    for world in (2, 4):
        for got, expected in zip(flattened(divided(world)), alone, strict=True):
            assert torch.equal(got, expected)


def test_of_equal_scores_the_first_experts_are_taken() -> None:
    chosen, shares = top_k(torch.tensor([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0]]), 2)
    assert chosen.tolist() == [[1, 2], [0, 1]]
    assert shares.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_scores_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LocalError, match="is not a number"):
        top_k(torch.tensor([[0.0, float("nan")]]), 1)
    with pytest.raises(LocalError, match="3 experts of scores"):
        top_k(torch.zeros(2, 2), 3)
    with torch_ranks(1) as ranks:
        group = ranks.jobs[0].group
        with pytest.raises(LocalError, match="each token goes to 3 of 2"):
            Experts([nn.Identity(), nn.Identity()], group, k=3)
        with pytest.raises(LocalError, match="for 4 tokens and 2 experts"):
            Experts([nn.Identity(), nn.Identity()], group, k=1)(torch.zeros(4, 3), torch.zeros(4, 3))
