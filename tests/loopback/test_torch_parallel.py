"""Tensor parallel layers against the undivided ones, on one to four ranks, which are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the check that there is a torch
from torch_ranks import torch_ranks  # noqa: E402 - likewise

from quicoll.errors import LocalError  # noqa: E402 - likewise
from quicoll.torch import functional  # noqa: E402 - likewise
from quicoll.torch.parallel import (  # noqa: E402 - likewise
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    parts,
)

WORLDS = [1, 2, 3, 4]
DTYPES = [torch.float32, torch.bfloat16]
INPUTS, HIDDEN, LENGTH = 12, 22, 7  # none of which divides evenly by 4, and the last by 2 and 3 neither

Layer = Callable[[Any, Any, bool], Any]


def undivided(kind: str, dtype: Any) -> list[Any]:
    torch.manual_seed(3)
    if kind == "attention":
        layers = [nn.MultiheadAttention(INPUTS, 3, batch_first=True)]
        nn.init.normal_(layers[0].in_proj_bias)  # zero otherwise
    else:
        layers = [nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, INPUTS)]
    return [layer.to(dtype) for layer in layers]


def plain(kind: str, layers: list[Any], x: Any) -> Any:
    if kind == "attention":
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=x.dtype)
        return layers[0](x, x, x, attn_mask=mask, need_weights=False)[0]
    hidden = layers[0](x)
    return layers[1](nn.functional.gelu(hidden)) if kind == "mlp" else layers[1](hidden)


def divided(kind: str, layers: list[Any], group: Any, sequence_parallel: bool) -> Any:
    if kind == "attention":
        layer = ParallelAttention(layers[0], group, sequence_parallel=sequence_parallel)
        return layer, lambda x: layer(x, is_causal=True)
    if kind == "mlp":
        layer = ParallelMLP(*layers, group, sequence_parallel=sequence_parallel)
        return layer, layer
    up = ColumnParallelLinear.of(layers[0], group, sequence_parallel=sequence_parallel)
    down = RowParallelLinear.of(layers[1], group, sequence_parallel=sequence_parallel)
    layer = nn.Sequential(up, down)
    return layer, layer


def loss_of(y: Any) -> Any:
    weights = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)
    return (weights * y).square().mean()


def close(got: Any, wanted: Any) -> None:
    """As near as the rounding of sums in another order is; a missing term or a doubled one is far off."""
    tolerance = 1e-5 if got.dtype is torch.float32 else 0.03
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


def gradients_whole(layer: Any) -> Any:
    """The gradients of a divided layer, put together as `whole` puts weights together."""
    with torch.no_grad():
        for each in layer.parameters():
            each.copy_(each.grad)
    return layer


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", ["linear", "mlp", "attention"])
def test_a_divided_layer_is_the_undivided_one(kind: str, world: int) -> None:
    with torch_ranks(world, timeout=60.0) as ranks:
        for dtype in DTYPES:
            for sequence_parallel in (False, True):
                layers = undivided(kind, dtype)
                torch.manual_seed(4)
                given = torch.randn(2, LENGTH, INPUTS).to(dtype)
                x = given.clone().requires_grad_()
                y = plain(kind, layers, x)
                loss_of(y).backward()

                def one(
                    _: Any, rank: int, given: Any = given, divide: bool = sequence_parallel, layers: Any = layers
                ) -> tuple[Any, ...]:
                    group, counts = ranks.jobs[rank].group, parts(LENGTH, world)
                    layer, compute = divided(kind, layers, group, divide)
                    x = given.clone().requires_grad_()
                    # What is divided along the sequence is put together again, for one loss of all ranks.
                    entered = functional.own_part(x, group, dim=-2, counts=counts) if divide else x
                    y = compute(entered)
                    y = functional.join_parts(y, group, dim=-2, counts=counts) if divide else y
                    loss_of(y).backward()
                    gradients_whole(layer)
                    named = dict(layer.named_modules())
                    ends = ["into", "out"] if kind == "attention" else ["up", "down"] if kind == "mlp" else ["0", "1"]
                    return y.detach(), x.grad, *(named[name].whole() for name in ends)

                for got, for_x, first, second in ranks.all(one):
                    close(got, y.detach())
                    close(for_x, x.grad)
                    last = layers[-1].out_proj if kind == "attention" else layers[1]
                    close(second.weight.detach(), last.weight.grad)
                    close(second.bias.detach(), last.bias.grad)
                    if kind == "attention":
                        in_order = rows_of(parts(3, world))
                        close(first.weight.detach(), layers[0].in_proj_weight.grad[in_order])
                        close(first.bias.detach(), layers[0].in_proj_bias.grad[in_order])
                    else:
                        close(first.weight.detach(), layers[0].weight.grad)
                        close(first.bias.detach(), layers[0].bias.grad)


def rows_of(heads: list[int]) -> Any:
    """Which rows of q, k and v each rank has, one rank after the other."""
    width, rows, begin = INPUTS // 3, [], 0
    for count in heads:
        rows += [at * INPUTS + begin * width + place for at in range(3) for place in range(count * width)]
        begin += count
    return torch.tensor(rows)


def test_outputs_are_put_together_and_the_layer_given_back_as_it_was() -> None:
    with torch_ranks(3, timeout=60.0) as ranks:
        layer = undivided("linear", torch.float32)[0]
        x = torch.randn(2, INPUTS)

        def one(_: Any, rank: int) -> Any:
            up = ColumnParallelLinear.of(layer, ranks.jobs[rank].group, counts=[20, 0, 2])
            return up.weight.shape[0], up.together(up(x)).detach(), up.whole()

        found = ranks.all(one)
    assert [rows for rows, _, _ in found] == [20, 0, 2]
    for _, y, whole in found:
        close(y, layer(x).detach())
        assert torch.equal(whole.weight, layer.weight)
        assert torch.equal(whole.bias, layer.bias)


def test_a_layer_without_bias() -> None:
    with torch_ranks(2, timeout=60.0) as ranks:
        torch.manual_seed(3)
        up, down = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)
        x = torch.randn(5, 4)

        def one(_: Any, rank: int) -> Any:
            layer = ParallelMLP(up, down, ranks.jobs[rank].group, activation=torch.relu)
            return layer(x).detach(), layer.up.whole().bias, layer.down.whole().bias

        for y, *biases in ranks.all(one):
            close(y, down(torch.relu(up(x))).detach())
            assert biases == [None, None]


def test_what_cannot_be_divided_is_refused() -> None:
    with torch_ranks(1) as ranks:
        group = ranks.jobs[0].group
        for call, words in [
            (lambda: ColumnParallelLinear.of(nn.Linear(4, 6), group, counts=[5]), "counts of 6 for 1 ranks"),
            (lambda: RowParallelLinear.of(nn.Linear(4, 6), group, counts=[6]), "counts of 4 for 1 ranks"),
            (lambda: ParallelMLP(nn.Linear(4, 6), nn.Linear(5, 4), group), "6 outputs before one of 5 inputs"),
            (lambda: ParallelAttention(nn.MultiheadAttention(4, 2), group), "batch_first"),
            (lambda: ParallelAttention(nn.MultiheadAttention(4, 2, 0.1, batch_first=True), group), "without dropout"),
            (
                lambda: ParallelAttention(nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True), group),
                "bias_k",
            ),
            (
                lambda: ParallelAttention(nn.MultiheadAttention(4, 2, kdim=3, batch_first=True), group),
                "of one width",
            ),
        ]:
            with pytest.raises(LocalError, match=words):
                call()
