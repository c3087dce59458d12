"""A torch program over the backend "quicoll", for torchrun: each check is run by all ranks, and told by its name.

    torchrun --nproc-per-node=2 torch_program.py DIRECTORY

Rank 0 leaves the names of the checks that held in DIRECTORY/checks.json; the first one that fails ends the program.
"""

from __future__ import annotations

import contextlib
import copy
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import quicoll
import quicoll.torch_backend

CHECKS: list[Callable[[Path], None]] = []
WORLD = int(os.environ["WORLD_SIZE"])
RANK = int(os.environ["RANK"])


def check(function: Callable[[Path], None]) -> Callable[[Path], None]:
    CHECKS.append(function)
    return function


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Any) -> Any:
        return self.down(F.relu(self.norm(self.up(x))))


def net(seed: int = 0, kind: Any = Net) -> Any:
    torch.manual_seed(seed)
    return kind()


def batch(step: int, rank: int) -> Any:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(model: Any, x: Any) -> Any:
    return (model(x) ** 2).mean()


def trained_alone(model: Any, steps: int) -> Any:
    """One process with the mean of all ranks' gradients, in the order of the library: as a tree over the ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        rows = []
        for rank in range(WORLD):
            optimizer.zero_grad()
            loss_of(model, batch(step, rank)).backward()
            rows.append([p.grad.clone() for p in model.parameters()])
        optimizer.zero_grad()
        for index, p in enumerate(model.parameters()):
            p.grad = tree([row[index] for row in rows]) / WORLD
        optimizer.step()
    return model


def tree(leaves: list[Any]) -> Any:
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return tree(leaves[:half]) + tree(leaves[half:])


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def close(a: Any, b: Any) -> bool:
    return all(torch.allclose(x, y, atol=1e-6) for x, y in zip(a, b, strict=True))


@check
def the_backend_is_known_and_the_group_is_torchs(_: Path) -> None:
    assert dist.is_backend_available("quicoll")
    assert dist.get_backend() == "quicoll"
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, WORLD)
    assert "quicoll" in repr(dist.group.WORLD)


@check
def object_collectives(_: Path) -> None:
    found: list[Any] = [None] * WORLD
    dist.all_gather_object(found, {"rank": RANK})
    assert found == [{"rank": n} for n in range(WORLD)]
    given = [["from", RANK], RANK]
    dist.broadcast_object_list(given, src=1)
    assert given == [["from", 1], 1]
    own: list[Any] = [None]
    dist.scatter_object_list(own, [f"for {n}" for n in range(WORLD)] if RANK == 0 else None, src=0)
    assert own == [f"for {RANK}"]
    gathered: list[Any] | None = [None] * WORLD if RANK == 1 else None
    dist.gather_object(RANK, gathered, dst=1)
    assert gathered == (list(range(WORLD)) if RANK == 1 else None)


@check
def complex_numbers_and_functional_collectives(_: Path) -> None:
    import torch.distributed._functional_collectives as functional

    x = torch.full((3,), 1 + RANK * 1j)
    dist.all_reduce(x)
    assert torch.equal(x, torch.full((3,), WORLD + sum(range(WORLD)) * 1j))
    total = functional.all_reduce(torch.ones(2), "sum", dist.group.WORLD)
    assert functional.wait_tensor(total).tolist() == [WORLD] * 2
    whole = functional.all_gather_single(torch.tensor([float(RANK)]), 0, dist.group.WORLD)
    assert whole.tolist() == list(range(WORLD))
    part = functional.reduce_scatter_single(torch.arange(float(WORLD)), "sum", 0, dist.group.WORLD)
    assert part.tolist() == [RANK * WORLD]


@check
def groups_of_some_ranks(_: Path) -> None:
    every = [dist.new_group([n, (n + 1) % WORLD]) for n in range(WORLD)] if WORLD > 2 else [dist.new_group([1, 0])]
    for group in every:
        ranks = dist.get_process_group_ranks(group) if dist.get_rank(group) >= 0 else []
        if ranks:
            x = torch.tensor([float(RANK)])
            dist.all_reduce(x, group=group)
            assert x.item() == sum(ranks)
    alone = dist.new_group([RANK], use_local_synchronization=True)
    x = torch.tensor([float(RANK)])
    dist.all_reduce(x, group=alone)
    assert x.item() == RANK
    for _ in range(2):  # the same name comes back
        made = dist.new_group(list(range(WORLD)), use_local_synchronization=True)
        assert_sum(made)
        dist.destroy_process_group(made)


def assert_sum(group: Any = None) -> None:
    x = torch.ones(1)
    dist.all_reduce(x, group=group)
    assert x.item() == dist.get_world_size(group)


@check
def batches_of_messages(_: Path) -> None:
    after, before = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    got = torch.empty(3)
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.full((3,), float(RANK)), after), dist.P2POp(dist.irecv, got, before)]
    )
    for work in works:
        work.wait()
    assert got.tolist() == [before] * 3
    if RANK == 0:
        found = [dist.recv(torch.empty(1), tag=4) for _ in range(WORLD - 1)]
        assert sorted(found) == list(range(1, WORLD))
    else:
        dist.send(torch.ones(1), 0, tag=4)


@check
def coalesced_operations(_: Path) -> None:
    xs = [torch.full((n + 1,), 1.0) for n in range(3)]
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    assert [x.tolist() for x in xs] == [[WORLD] * (n + 1) for n in range(3)]
    outs = [torch.empty(WORLD * (n + 1)) for n in range(2)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for n, out in enumerate(outs):
            dist.all_gather_single(out, torch.full((n + 1,), float(RANK)))
    manager.wait()
    assert outs[1].tolist() == [float(n) for n in range(WORLD) for _ in range(2)]


@check
def data_parallel_has_the_bits_of_one_process(_: Path) -> None:
    model = DistributedDataParallel(net(seed=RANK), bucket_cap_mb=1)  # rank 0's parameters are everybody's
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(step, RANK)).backward()
        optimizer.step()
    alone = trained_alone(net(), 3)
    # DDP divides each gradient by the number of ranks before the sum; with two ranks that is exact.
    agree = same if WORLD in (1, 2, 4) else close
    assert agree(model.module.parameters(), alone.parameters())
    every: list[Any] = [None] * WORLD
    dist.all_gather_object(every, [p.detach().numpy().tobytes() for p in model.parameters()])
    assert all(each == every[0] for each in every)


@check
def data_parallel_with_uneven_inputs_divides_by_those_that_are_left(_: Path) -> None:
    model = DistributedDataParallel(nn.Linear(4, 4, bias=False))
    with model.join(divide_by_initial_world_size=False):
        for _ in range(2 + RANK):  # rank 0 is the first without data
            model.zero_grad()
            model(torch.ones(1, 4) * 8).sum().backward()
            assert torch.equal(model.module.weight.grad, torch.full((4, 4), 8.0))


@check
def data_parallel_with_hooks_unused_and_sparse_parameters(_: Path) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(10, 4, sparse=True)
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return (self.first if x[0] % 2 else self.second)(self.words(x)).sum()

    parts = DistributedDataParallel(net(kind=Parts), find_unused_parameters=True)
    parts(torch.tensor([RANK, RANK + 1])).backward()
    dense = parts.module.words.weight.grad.to_dense()
    assert dense.abs().sum(1).nonzero().flatten().tolist() == list(range(WORLD + 1))
    for hook, state in (
        (default_hooks.fp16_compress_hook, None),
        (default_hooks.allreduce_hook, None),
        (power.powerSGD_hook, power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)),
    ):
        model = DistributedDataParallel(net())
        model.register_comm_hook(state, hook)
        for step in range(4):
            loss_of(model, batch(step, RANK)).backward()
        norms: list[Any] = [None] * WORLD
        dist.all_gather_object(norms, float(sum(p.grad.norm() for p in model.parameters())))
        assert len({*norms}) == 1


@check
def fully_sharded(directory: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    model = net()
    for part in (model.up, model.down):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, batch(step, RANK)).backward()
        optimizer.step()
    assert close([p.full_tensor() for p in model.parameters()], trained_alone(net(), 3).parameters())
    half = fully_shard(net(), mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    loss_of(half, batch(0, RANK)).backward()
    assert all(p.grad is not None for p in half.parameters())

    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    saved = get_model_state_dict(model)
    dcp.save({"model": saved}, checkpoint_id=directory / "dcp")
    other = net(seed=9)
    fully_shard(other, mesh=mesh)
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=directory / "dcp")
    set_model_state_dict(other, state["model"])
    assert same([p.full_tensor() for p in model.parameters()], [p.full_tensor() for p in other.parameters()])


@check
def tensor_parallel(_: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    whole = torch.arange(24.0).view(4, 6)
    sharded = distribute_tensor(whole, mesh, [Shard(0)])
    assert isinstance(sharded, DTensor)
    assert torch.equal(sharded.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    assert torch.equal((sharded + sharded).redistribute(mesh, [Replicate()]).to_local(), whole * 2)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Any) -> Any:
            return self.down(F.relu(self.up(x)))

    model, alone = net(kind=Two), net(kind=Two)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = batch(0, 0)
    loss, expected = loss_of(model, x), loss_of(alone, x)
    loss.backward()
    expected.backward()
    assert torch.allclose(loss, expected, atol=1e-6)
    assert close([p.grad.full_tensor() for p in model.parameters()], [p.grad for p in alone.parameters()])


@check
def a_pipeline(_: Path) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(3)
    layers = [nn.Linear(8, 8) for _ in range(WORLD)]
    stage = PipelineStage(copy.deepcopy(layers[RANK]), RANK, WORLD, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, target: ((out - target) ** 2).mean())
    x, target = torch.cat([batch(n, 0) for n in range(4)]), torch.zeros(16, 8)
    for _ in range(2):
        stage.submod.zero_grad()
        if RANK == 0:
            schedule.step(x, **({"target": target} if WORLD == 1 else {}))
        elif RANK == WORLD - 1:
            schedule.step(target=target)
        else:
            schedule.step()
    grads = [p.grad for p in stage.submod.parameters()]
    ((nn.Sequential(*layers)(x) - target) ** 2).mean().backward()
    assert all(torch.allclose(g, p.grad, atol=1e-6) for g, p in zip(grads, layers[RANK].parameters(), strict=True))


@check
def a_forked_child_leaves_all_to_its_parent(_: Path) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        said = pool.apply(in_a_child)
    assert said == "LocalError"
    found = sorted(float(x) for x in torch.utils.data.DataLoader([torch.ones(1) * n for n in range(4)], num_workers=1))
    assert found == [0.0, 1.0, 2.0, 3.0]
    assert_sum()


def in_a_child() -> str:
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return type(error).__name__
    return "nothing"


@check
def the_group_is_made_again_after_its_end(directory: Path) -> None:
    dist.destroy_process_group()
    for number in range(2):
        dist.init_process_group(
            "quicoll", init_method=f"file://{directory}/again{number}", rank=RANK, world_size=WORLD,
            timeout=timedelta(seconds=200),
        )  # fmt: skip
        assert_sum()
        dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    assert_sum(dist.new_group(list(range(WORLD)), backend="quicoll"))
    # A timeout of operations is none for the ranks to meet.
    dist.new_group(list(range(WORLD)), backend="quicoll", timeout=timedelta(milliseconds=1))
    dist.destroy_process_group()
    dist.init_process_group("quicoll", timeout=timedelta(seconds=200))
    assert_sum()


@check
def who_does_not_come_is_named_on_all_ranks_and_no_call_blocks(directory: Path) -> None:
    began = time.monotonic()
    told = directory / "told0"
    with expecting(quicoll.PeerError) as found:
        if RANK == 1:
            while not told.exists() and time.monotonic() - began < 100:  # else both would have called, and not the same
                time.sleep(0.01)
            dist.barrier()
        else:
            group = dist.group.WORLD
            assert group is not None
            group.allreduce([torch.ones(1)], _within(1.0)).wait()
    if RANK == 0:
        told.touch()
    assert time.monotonic() - began < 100
    assert "rank 1 (worker-1) did not call" in str(found[0])
    assert isinstance(found[0], dist.DistBackendError)
    with expecting(RuntimeError):  # DDP's backward pass raises, and does not end the process
        DistributedDataParallel(net())


def _within(seconds: float) -> Any:
    made = dist.AllreduceOptions()
    made.timeout = timedelta(seconds=seconds)
    return made


@contextlib.contextmanager
def expecting(kind: type[BaseException]) -> Iterator[list[BaseException]]:
    found: list[BaseException] = []
    try:
        yield found
    except kind as error:
        found.append(error)
    else:
        raise AssertionError(f"no {kind.__name__}")


def main() -> None:
    directory = Path(sys.argv[1])
    dist.init_process_group("quicoll", timeout=timedelta(seconds=200))
    held = []
    for each in CHECKS:
        began = time.monotonic()
        each(directory)
        held.append(each.__name__)
        if RANK == 0:
            print(f"{each.__name__} {time.monotonic() - began:.2f}", flush=True)  # noqa: T201 - shown where one fails
    if RANK == 0:
        (directory / "checks.json").write_text(json.dumps(held))
    # No destroy_process_group: the interpreter has to end without it.


if __name__ == "__main__":
    main()
