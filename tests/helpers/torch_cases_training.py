"""What DDP and its like offer, and their combinations on a mesh: cases for torch_beside_gloo.py.

Each trains a small model for some steps and gives its losses and parameters. With two ranks there is one order in which
two gradients can be added, so Gloo's bits are asked for; likewise on a mesh of 2 x 2, whose groups are pairs.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.algorithms.ddp_comm_hooks import (
    ddp_zero_hook,
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging import averagers, hierarchical_model_averager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch_beside_gloo import case, rank, same_everywhere, some


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 16), nn.LayerNorm(16)
        self.mid, self.down = nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return self.down(torch.tanh(self.mid(F.relu(self.norm(self.up(x))))))


def net(kind: Any = Net) -> Any:
    torch.manual_seed(0)
    return kind()


def loss_of(model: Any, step: int) -> Any:
    return (model(some(4, 8, seed=50 + step)) ** 2).mean()


def trained(model: Any, optimizer: Any = None, *, steps: int = 4) -> list[Any]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses), *model.parameters(), *[each.float() for each in model.buffers()]]


# -- what DDP's constructor and its methods take ---------------------------------------------------------------------


@case(2)
def static_graph() -> Any:
    return trained(DDP(net(), static_graph=True))


class OneOfTwo(nn.Module):
    """Each rank, and each step, leaves other parameters unused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.calls = nn.Linear(8, 8), nn.Linear(8, 8), 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return (self.first if (self.calls + rank()) % 2 else self.second)(x)


@case(2)
def find_unused_parameters() -> Any:
    return trained(DDP(net(OneOfTwo), find_unused_parameters=True))


@case(2)
def gradient_as_bucket_view_and_many_buckets() -> Any:
    return trained(DDP(net(), gradient_as_bucket_view=True, bucket_cap_mb=0.0005))


@case(2)
def no_sync() -> Any:
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        with contextlib.nullcontext() if step % 2 else model.no_sync():
            loss_of(model, step).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


@case(2)
def join() -> Any:
    model = DDP(net())
    with model.join():
        trained(model, steps=2 + rank())
    return list(model.parameters())


@case(2)
def join_that_ends_with_the_first() -> Any:
    model = DDP(net())
    try:
        with model.join(throw_on_early_termination=True):
            trained(model, steps=2 + rank())
    except RuntimeError as error:
        return [torch.ones(1)] if "exhausted" in str(error) else []
    return []


@case(2)
def sub_group_mesh_and_no_first_broadcast() -> Any:
    pair = dist.new_group([0, 1])
    mesh = init_device_mesh("cpu", (2,))
    models = [DDP(net(), process_group=pair), DDP(net(), device_mesh=mesh), DDP(net(), init_sync=False)]
    return [each for model in models for each in trained(model)]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Any) -> Any:
        return self.norm(self.linear(x))


@case(2)
def buffers_and_a_hook_for_them() -> Any:
    model, hooked = DDP(net(Normed)), DDP(net(Normed))

    def add(_: Any, buffers: Any) -> Any:
        numbers = [each for each in buffers.values() if each.dtype.is_floating_point]
        return [dist.all_reduce(each, async_op=True).get_future() for each in numbers]

    hooked._register_buffer_comm_hook(None, add)
    return trained(model) + trained(hooked)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        again = checkpoint(self.first, x, use_reentrant=False)
        return self.second(again) + checkpoint(self.second, x, use_reentrant=True)


@case(2)
def activation_checkpoints_in_a_static_graph() -> Any:
    return trained(DDP(net(Checkpointed), static_graph=True))


@case(2)
def autocast_and_bfloat16_parameters() -> Any:
    model, half = DDP(net()), DDP(net().bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [loss_of(model, 0), loss_of(half, 0)]
    for loss in losses:
        loss.backward()
    return [each.grad for each in (*model.parameters(), *half.parameters())]


@case(2)
def clipping() -> Any:
    model = DDP(net())
    loss_of(model, 0).backward()
    return [nn.utils.clip_grad_norm_(model.parameters(), 0.1), *[each.grad for each in model.parameters()]]


# -- communication hooks ---------------------------------------------------------------------------------------------


def hooked(state: Any, hook: Any) -> list[Any]:
    model = DDP(net())
    model.register_comm_hook(state, hook)
    return trained(model, steps=5)


def power(**named: Any) -> Any:
    return powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2, **named)


case(2, "hook: allreduce")(lambda: hooked(None, default_hooks.allreduce_hook))
case(2, "hook: fp16_compress")(lambda: hooked(None, default_hooks.fp16_compress_hook))
case(2, "hook: noop")(lambda: hooked(None, debugging_hooks.noop_hook))
case(2, "hook: powerSGD")(lambda: hooked(power(), powerSGD_hook.powerSGD_hook))
case(2, "hook: powerSGD without its memory")(
    lambda: hooked(power(warm_start=False, use_error_feedback=False), powerSGD_hook.powerSGD_hook)
)
case(2, "hook: fp16_compress_wrapper of powerSGD")(
    lambda: hooked(power(), default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook))
)


@case(2, "hook: bf16_compress, by another name")
def bf16_compress() -> Any:
    """torch refuses the hook of this name, and not what it does."""
    return hooked(None, lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket))


@case(2, "hook: futures in a chain")
def futures_in_a_chain() -> Any:
    def chain(tensor: Any) -> Any:
        future = dist.all_reduce(tensor, async_op=True).get_future()
        return future.then(lambda done: done.value()[0] / 2).then(lambda done: done.value() * 1)

    return hooked(None, lambda state, bucket: chain(bucket.buffer()))


@case(2, "hook: torch's own in C++")
def built_in() -> Any:
    model = DDP(net())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return trained(model)


# -- optimizers ------------------------------------------------------------------------------------------------------


def alone() -> Any:
    return dist.new_group([rank()], use_local_synchronization=True)


@case(2)
def post_local_sgd() -> Any:
    model = DDP(net())
    model.register_comm_hook(
        post_localSGD_hook.PostLocalSGDState(None, alone(), start_localSGD_iter=2),
        post_localSGD_hook.post_localSGD_hook,
    )
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = averagers.PeriodicModelAverager(period=2, warmup_steps=2)
    return trained(model, PostLocalSGDOptimizer(inner, averager), steps=7)


@case(4, "hierarchical model averaging: near")
def hierarchical() -> Any:
    model = net()
    averager = hierarchical_model_averager.HierarchicalModelAverager(
        period_group_size_dict=OrderedDict([(2, 2), (4, 4)]), warmup_steps=1
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
    return list(model.parameters())


def zero(model: Any, kind: Any = torch.optim.Adam, **named: Any) -> Any:
    return ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.01, **named)


@case(2)
def zero_redundancy() -> Any:
    model = DDP(net())
    optimizer = zero(model)
    found = trained(model, optimizer)
    optimizer.consolidate_state_dict(to=0)
    return found + ([] if rank() else [each["exp_avg"] for each in optimizer.state_dict()["state"].values()])


@case(2)
def zero_redundancy_with_bucket_views() -> Any:
    model = DDP(net(), gradient_as_bucket_view=True)
    return trained(model, zero(model, torch.optim.AdamW, parameters_as_bucket_view=True))


@case(2)
def zero_redundancy_and_join() -> Any:
    model = DDP(net())
    optimizer = zero(model, torch.optim.SGD)
    with Join([model, optimizer]):
        trained(model, optimizer, steps=2 + rank())
    return list(model.parameters())


@case(2)
def zero_redundancy_within_the_backward_pass() -> Any:
    """torch refuses this over Gloo. There a plain loop stands for it, less the two steps in which the hook warms up."""
    found = []
    for hook in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
        model = DDP(net())
        plain = dist.get_backend() == "gloo"
        optimizer = zero(model, torch.optim.SGD, overlap_with_ddp=not plain)
        if not plain:
            model.register_comm_hook(None, hook(default_hooks.allreduce_hook, model, optimizer))
        for step in range(5):
            model.zero_grad()
            loss_of(model, step).backward()
            if plain and step >= 2:
                optimizer.step()
        found += list(model.parameters())
    return found


# -- beside other ways to divide a model -----------------------------------------------------------------------------


def mesh_of_four() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return self.down(F.relu(self.up(self.norm(x))))


def parallel(mesh: Any) -> Any:
    return parallelize_module(net(Perceptron), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained_on(mesh: Any, model: Any, optimizer: Any = None) -> list[Any]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        x = same_everywhere(4, 8, seed=100 * step + mesh.get_local_rank("dp"))
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(whole(loss).detach())
    return [*losses, *[whole(each) for each in model.parameters()]]


@case(4)
def data_parallel_over_tensor_parallel_by_its_mesh() -> Any:
    mesh = mesh_of_four()
    return trained_on(mesh, DDP(parallel(mesh), device_mesh=mesh["dp"]))


@case(4)
def data_parallel_over_tensor_parallel_of_plain_parameters() -> Any:
    mesh = mesh_of_four()
    model = parallel(mesh)
    _pre_dp_module_transform(model)
    model = DDP(model, process_group=mesh["dp"].get_group(), gradient_as_bucket_view=True)
    return trained_on(mesh, model, torch.optim.Adam(model.parameters(), lr=0.01))


@case(4)
def replicas_of_tensor_parallel_modules() -> Any:
    mesh = mesh_of_four()
    by_ddp = trained_on(mesh, replicate(parallel(mesh), device_mesh=mesh["dp"]))
    return by_ddp + trained_on(mesh, replicate_with_fsdp(parallel(mesh), mesh=mesh["dp"]))


@case(4)
def fully_sharded_tensor_parallel_modules() -> Any:
    mesh = mesh_of_four()
    along_the_sequence = parallelize_module(
        net(Perceptron),
        mesh["tp"],
        {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(),
        },
    )
    models = [fully_shard(each, mesh=mesh["dp"]) for each in (parallel(mesh), along_the_sequence)]
    return [each for model in models for each in trained_on(mesh, model)]


@case(4)
def sharded_in_pairs_and_replicated() -> Any:
    mesh = mesh_of_four()
    older = FullyShardedDataParallel(
        net(Perceptron),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_id=torch.device("cpu"),
    )
    found = trained_on(mesh, fully_shard(net(Perceptron), mesh=mesh))
    trained_on(mesh, older)
    with FullyShardedDataParallel.summon_full_params(older):
        return found + [each.detach().clone() for each in older.parameters()]


@case(4)
def a_loss_that_is_divided() -> Any:
    scores = distribute_tensor(same_everywhere(4, 8), mesh_of_four()["tp"], [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = F.cross_entropy(scores, torch.arange(4))
        loss.backward()
    return [whole(loss), whole(scores.grad)]


@case(4)
def every_move_of_a_tensor_on_a_mesh() -> Any:
    mesh, tensor = mesh_of_four(), torch.arange(40.0).view(8, 5)
    placed = (Shard(0), Shard(1), Replicate())
    ways = [(first, second) for first in placed for second in placed]
    moved = [distribute_tensor(tensor, mesh, list(given)) for given in ways]
    return [each.redistribute(mesh, list(wanted)).full_tensor() for each in moved for wanted in ways]


@case(4)
def groups_of_groups() -> Any:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    groups = [
        dist.new_subgroups(2)[0],
        dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0],
        mesh._unflatten(0, (2, 2), ("a", "b"))["a"].get_group(),
    ]
    found = [some(3, seed=n) for n in range(len(groups))]
    for x, group in zip(found, groups, strict=True):
        dist.all_reduce(x, group=group)
    return found
