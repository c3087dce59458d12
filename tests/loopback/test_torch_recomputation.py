"""Blocks that are computed again have the bits of those that keep all, on one to four ranks, which are threads."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the check that there is a torch
from torch_ranks import torch_ranks  # noqa: E402 - likewise

from quicoll.errors import Corrupted, LocalError  # noqa: E402 - likewise
from quicoll.torch import functional, recomputed  # noqa: E402 - likewise
from quicoll.torch.parallel import ParallelAttention, ParallelMLP, parts  # noqa: E402 - likewise

WIDTH, LENGTH = 12, 7


class Block(nn.Module):
    """What a transformer consists of, divided among ranks."""

    def __init__(self, dtype: Any, group: Any, sequence_parallel: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2)).to(dtype)
        attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True).to(dtype)
        up, down = nn.Linear(WIDTH, 22).to(dtype), nn.Linear(22, WIDTH).to(dtype)
        self.attention = ParallelAttention(attention, group, sequence_parallel=sequence_parallel)
        self.mlp = ParallelMLP(up, down, group, sequence_parallel=sequence_parallel)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norms[0](x), is_causal=True)
        return x + self.mlp(self.norms[1](x))


def passed(blocks: list[Any], given: Any, group: Any, sequence_parallel: bool, again: bool) -> list[Any]:
    """Outputs and all gradients; with `again` each block is computed twice."""
    counts = parts(LENGTH, group.world_size)
    for block in blocks:
        block.zero_grad()
    x = given.clone().requires_grad_()
    y = functional.own_part(x, group, dim=-2, counts=counts) if sequence_parallel else x
    for block in blocks:
        y = recomputed(block, y, group=None if sequence_parallel else group, check=True) if again else block(y)
    y = functional.join_parts(y, group, dim=-2, counts=counts) if sequence_parallel else y
    (torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape) * y).square().mean().backward()
    return [y.detach(), x.grad, *(each.grad for block in blocks for each in block.parameters())]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_divided_blocks_that_are_computed_again_have_the_bits_of_those_that_keep_all(world: int) -> None:
    with torch_ranks(world, timeout=60.0) as ranks:
        for dtype in (torch.float32, torch.bfloat16):
            for sequence_parallel in (False, True):
                torch.manual_seed(4)
                given = torch.randn(2, LENGTH, WIDTH).to(dtype)
                made = [
                    [Block(dtype, job.group, sequence_parallel) for _ in range(2)] for job in ranks.jobs
                ]  # here, as all threads have one generator

                def one(
                    _: Any, rank: int, made: Any = made, given: Any = given, divide: bool = sequence_parallel
                ) -> bool:
                    group = ranks.jobs[rank].group
                    kept, again = (passed(made[rank], given, group, divide, twice) for twice in (False, True))
                    assert all(float(each.abs().sum()) > 0 for each in kept[:2])
                    return all(map(torch.equal, kept, again))

                assert ranks.all(one) == [True] * world


def test_of_an_input_each_rank_keeps_its_share_alone() -> None:
    """Memory that numpy owns: it goes when the last tensor does that is in it."""

    def freed(group: Any) -> bool:
        memory = np.ones((4, WIDTH), np.float32)
        gone = weakref.ref(memory)
        x = torch.from_numpy(memory)
        del memory
        layer = nn.Linear(WIDTH, 3)
        y = recomputed(layer, x, group=group)
        del x
        gc.collect()
        found = gone() is None
        y.sum().backward()
        assert torch.equal(layer.weight.grad, torch.full((3, WIDTH), 4.0))
        return found

    with torch_ranks(3, timeout=60.0) as ranks:
        assert ranks.all(lambda _, rank: freed(ranks.jobs[rank].group)) == [True] * 3
    assert not freed(None)


LAYOUTS = {
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "in the middle of its memory": lambda x: torch.cat((torch.zeros(3), x.reshape(-1)))[3:].view(x.shape),
    "with gaps": lambda x: torch.stack((x, x), -1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape),
    "smaller than the ranks are many": lambda x: x[0, :1, :1].clone(),
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_input_comes_back_in_its_layout_and_place(name: str) -> None:
    seen: list[tuple[Any, ...]] = []

    def block(x: Any) -> Any:
        seen.append((x.shape, x.stride() if x.numel() else (), x.data_ptr() % 64 if x.numel() else 0, x.requires_grad))
        return (x * x).sum()

    with torch_ranks(2, timeout=60.0) as ranks:

        def one(_: Any, rank: int) -> Any:
            made = LAYOUTS[name](torch.arange(24.0).reshape(2, 3, 4)).detach().requires_grad_()
            recomputed(block, made, group=ranks.jobs[rank].group, check=True).backward()
            return torch.equal(made.grad, 2 * made)

        assert ranks.all(one) == [True, True]
    assert len(seen) == 4
    assert len(set(seen)) == 1


def test_dropout_has_the_same_masks_and_the_generator_goes_on_as_without() -> None:
    block = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.ReLU(), nn.Dropout(0.4))

    def one(again: bool) -> list[Any]:
        torch.manual_seed(5)
        block.zero_grad()
        x = torch.ones(3, 6, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            y = recomputed(block, x, check=True) if again else block(x)
        torch.rand(3)
        y.square().sum().backward()
        return [y.detach(), x.grad, *(each.grad for each in block.parameters()), torch.rand(4)]

    assert all(map(torch.equal, one(False), one(True)))


class Counting(nn.Module):
    """A buffer that is written, one that is replaced, and one that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("written", torch.zeros(1))
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("stays", torch.ones(1))

    def forward(self, x: Any) -> Any:
        self.written += 1
        self.replaced = self.replaced + x.detach().sum()
        return self.norm(x) * self.written.clone() * self.replaced * self.stays


def test_buffers_change_once_and_are_in_the_second_pass_what_they_were_in_the_first() -> None:
    def one(again: bool) -> list[Any]:
        torch.manual_seed(5)
        block = Counting()
        x = torch.rand(4, 6, requires_grad=True)
        y = sum(recomputed(block, x, check=True) if again else block(x) for _ in range(2))
        y.square().sum().backward()
        return [y.detach(), x.grad, *block.buffers(), *(each.grad for each in block.parameters())]

    assert all(map(torch.equal, one(False), one(True)))


def test_it_is_computed_again_for_each_backward_pass_and_for_gradients_of_inputs_alone() -> None:
    calls: list[int] = []

    def block(x: Any, power: int) -> Any:
        calls.append(power)
        return x**power

    x = torch.full((2,), 3.0, requires_grad=True)
    y = recomputed(block, x, 2)
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    y.sum().backward()
    assert first.tolist() == x.grad.tolist() == [6.0, 6.0]
    assert calls == [2, 2, 2]
    with torch.no_grad():
        assert recomputed(block, x, 2).tolist() == [9.0, 9.0]


def test_a_second_pass_of_other_bits_is_found_and_named() -> None:
    def odd(x: Any) -> Any:
        calls.append(1)
        return [x * 2, x * x * len(calls)]

    calls: list[int] = []
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(Corrupted, match="encoder computed again gives other bits than before: result 1 of"):
        recomputed(odd, x, check=True, name="encoder")[1].sum().backward()
    calls.clear()
    recomputed(odd, x)[1].sum().backward()  # nobody asked


def test_inputs_that_are_not_equal_on_all_ranks_are_found_on_all() -> None:
    with torch_ranks(2, timeout=60.0) as ranks:

        def one(_: Any, rank: int) -> Any:
            x = torch.full((4,), float(rank), requires_grad=True)
            y = recomputed(torch.square, x, group=ranks.jobs[rank].group, check=True, name="stem")
            with pytest.raises(Corrupted, match="input 0 of stem, put together from the shares of all ranks") as found:
                y.sum().backward()
            return found.value.rank

        assert ranks.all(one) == [0, 1]


def test_an_input_that_is_written_in_place_is_refused_and_a_divided_one_is_what_it_was() -> None:
    def one(group: Any) -> Any:
        layer = nn.Linear(2, 1, bias=False)
        x = torch.ones(4, 2)
        y = recomputed(layer, x, group=group)
        x.fill_(7.0)
        y.sum().backward()
        return layer.weight.grad.tolist()

    with pytest.raises(LocalError, match="input 0 of Linear was written in place"):
        one(None)
    with torch_ranks(2, timeout=60.0) as ranks:
        assert ranks.all(lambda _, rank: one(ranks.jobs[rank].group)) == [[[4.0, 4.0]]] * 2
