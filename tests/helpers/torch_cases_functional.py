"""torch's functional collectives, and what torch.compile makes of collectives: cases for torch_beside_gloo.py.

Every function of `torch.distributed._functional_collectives` is called, and every operation of `_c10d_functional`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch_beside_gloo import case, rank, some, world

native: Any = torch.ops._c10d_functional
legacy: Any = torch.ops.c10d_functional


def every() -> Any:
    return dist.group.WORLD


def name() -> Any:
    return every().group_name


def other() -> int:
    return 1 - rank()


def waited(*results: Any) -> list[Any]:
    return [native.wait_tensor(each) for each in results]


@case(2)
def groups_by_whatever_names_them() -> Any:
    mesh = init_device_mesh("cpu", (world(),), mesh_dim_names=("dp",))
    groups = (every(), mesh, (mesh, 0), list(range(world())), name())
    return [functional.all_reduce(some(3), "sum", group) + 0 for group in groups]


@case(2)
def every_reduction() -> Any:
    numbers, bits = some(6), torch.arange(6, dtype=torch.int32) + rank()
    given = [(numbers, op) for op in ("sum", "avg", "product", "min", "max")]
    given += [(bits, op) for op in ("band", "bor", "bxor")]
    reduced = [functional.all_reduce(x, op, every()) + 0 for x, op in given]
    return reduced + [functional.reduce_scatter_single(x, op, 0, every()) + 0 for x, op in given]


@case(2)
def moves() -> Any:
    x = some(4, 2)
    return [
        functional.broadcast(x, 1, every()) + 0,
        *[functional.all_gather_single(x, dim, every()) + 0 for dim in (0, 1)],
        *[functional.all_gather_tensor(x, dim, every()) + 0 for dim in (0, 1)],
        *[functional.reduce_scatter_tensor(x, "sum", dim, every()) + 0 for dim in (0, 1)],
        functional.all_to_all_single(x, None, None, every()) + 0,
        functional.all_to_all_single(some(3, 2), [rank() + 1] * 2, [1, 2], every()) + 0,
        functional.permute_tensor(some(3), [1, 0], every()) + 0,
        x,
    ]


@case(2)
def several_tensors_at_once() -> Any:
    xs = [some(2), some(4, 2, seed=1)]
    found = functional.all_reduce_coalesced(xs, "sum", every())
    found += functional.all_gather_single_coalesced(xs, every())
    found += functional.all_gather_into_tensor_coalesced(xs, every())
    found += functional.reduce_scatter_single_coalesced(xs, "sum", [0, 1], every())
    found += functional.reduce_scatter_tensor_coalesced(xs, "sum", [0, 0], every())
    return [each + 0 for each in found]


def with_gradient(operation: Any) -> list[Any]:
    x = some(4, 2).requires_grad_()
    found = operation(x)
    parts = list(found) if isinstance(found, list | tuple) else [found]
    weighted = [(each * torch.arange(float(each.numel())).view_as(each) * (rank() + 1)).sum() for each in parts]
    torch.stack(weighted).sum().backward()
    return [*[each.detach() + 0 for each in parts], x.grad]


@case(2)
def gradients() -> Any:
    operations = [
        lambda x: functional.all_reduce(x, "sum", every()),
        lambda x: functional.all_gather_single(x, 0, every()),
        lambda x: functional.all_gather_single_autograd(x, 0, every()),
        lambda x: functional.all_gather_single_autograd(x, 1, every()),
        lambda x: functional.all_gather_tensor_autograd(x, 0, every()),
        lambda x: functional.reduce_scatter_single(x, "sum", 0, every()),
        lambda x: functional.reduce_scatter_single_autograd(x, "sum", 1, every()),
        lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, every()),
        lambda x: functional.all_to_all_single(x, None, None, every()),
        lambda x: functional.all_to_all_single_autograd(x, [2, 2], [2, 2], every()),
        lambda x: functional.all_reduce_coalesced([x, x * 2], "sum", every()),
        lambda x: functional.all_gather_single_coalesced([x, x * 2], every()),
        lambda x: functional.reduce_scatter_single_coalesced([x, x * 2], "sum", [0, 0], every()),
    ]
    return [each for operation in operations for each in with_gradient(operation)]


@case(2)
def gradients_of_the_older_operations() -> Any:
    older: Any = torch.ops._c10d_functional_autograd
    operations = [
        lambda x: waited(older.all_gather_into_tensor(x, world(), name())),
        lambda x: waited(older.reduce_scatter_tensor(x, "sum", world(), name())),
        lambda x: waited(older.all_to_all_single(x, [2, 2], [2, 2], name())),
    ]
    return [each for operation in operations for each in with_gradient(operation)]


@case(2)
def messages() -> Any:
    given, got = some(3), torch.empty(3)
    if rank() == 0:
        sent, came = functional.isend_inplace(given, 1), functional.irecv_inplace(got, 1)
    else:
        came, sent = functional.irecv_inplace(got, 0), functional.isend_inplace(given, 0)
    functional.wait_tensor(sent)
    return [came + 0]


@case(2)
def batches_of_messages() -> Any:
    received = []
    for group in (every(), dist.new_group([0, 1])):
        for kinds in (["isend", "irecv"], ["irecv", "isend"]):
            tensors = [some(3), torch.empty(3)] if kinds[0] == "isend" else [torch.empty(3), some(3)]
            came = functional.batch_p2p_ops_inplace(kinds, [other()] * 2, [0, 0], tensors, group.group_name)
            received += [functional.wait_tensor(each) for each in came if each.numel()]
            for each in came:
                functional.wait_tensor(each)
    return received


@case(2)
def batches_of_messages_in_another_backends_group() -> Any:
    """The supplied operations hand on what is not theirs."""
    group = dist.new_group([0, 1], backend="gloo")
    got, whole, x = torch.empty(3), torch.empty(6), some(3)
    for each in functional.batch_p2p_ops_inplace(["isend", "irecv"], [other()] * 2, [0, 0], [x, got], group.group_name):
        functional.wait_tensor(each)
    native.wait_tensor(native.all_gather_into_tensor_out(x, world(), group.group_name, out=whole))
    dist.destroy_process_group(group)
    return [got, whole]


@case(2)
def operations_that_write_to_what_they_are_given() -> Any:
    gathered, scattered = torch.empty(8, 2), torch.empty(2, 2)
    reduced, sent, both = some(4, 2), some(4, 2, seed=1), [some(2), some(3, seed=2)]
    x = some(4, 2)
    waited(
        native.all_gather_into_tensor_out(x, world(), name(), out=gathered),
        native.reduce_scatter_tensor_out(x, "sum", world(), name(), out=scattered),
        native.all_reduce_(reduced, "sum", name()),
        native.broadcast_(sent, 0, name()),
        *native.all_reduce_coalesced_(both, "sum", name()),
    )
    return [gathered, scattered, reduced, sent, *both]


@case(2)
def complex_numbers_strides_and_groups_as_objects() -> Any:
    turned = some(4, 6).t()
    return [
        each.clone()
        for each in waited(
            native.all_reduce(torch.complex(some(3), some(3, seed=3)), "sum", name()),
            native.all_reduce(turned, "sum", name()),
            native.all_gather_into_tensor(turned, world(), name()),
            native.all_reduce(some(3), "sum", every()),
        )
    ]


@case(2)
def the_legacy_operations() -> Any:
    where = ("", list(range(world())), world())
    x = some(4, 2)
    results = [
        legacy.broadcast(x, 0, *where),
        legacy.all_reduce(x, "sum", *where),
        *legacy.all_reduce_coalesced([x], "sum", *where),
        legacy.all_gather_into_tensor(x, *where),
        *legacy.all_gather_into_tensor_coalesced([x], *where),
        legacy.reduce_scatter_tensor(x, "sum", *where),
        *legacy.reduce_scatter_tensor_coalesced([x], "sum", *where),
        legacy.all_to_all_single(x, None, None, *where),
    ]
    return [legacy.wait_tensor(each) + 0 for each in results]


@case(2)
def the_legacy_messages() -> Any:
    got, more = torch.empty(3), torch.empty(3)
    came, sent = legacy.irecv(got, other(), 0, name()), legacy.isend(some(3), other(), 0, name())
    batch = legacy.batch_p2p_ops(["isend", "irecv"], [other()] * 2, [0, 0], [some(3, seed=1), more], name())
    for each in (came, sent, *batch):
        legacy.wait_tensor(each)
    return [got, more]


@case(2)
def forms_that_write_in_place() -> Any:
    x = some(4, 2)
    gathered, listed = torch.empty(8, 2), [torch.empty(4, 2), torch.empty(4, 2)]
    scattered, exchanged, reduced = torch.empty(2, 2), torch.empty(4, 2), x.clone()
    functional.all_gather_tensor_inplace(gathered, x)
    functional.all_gather_inplace(listed, x)
    functional.reduce_scatter_tensor_inplace(scattered, x)
    functional.all_to_all_inplace(exchanged, x, [2, 2], [2, 2])
    functional.all_reduce_inplace(reduced)
    return [gathered, *listed, scattered, exchanged, reduced]


@case(2)
def what_nobody_waits_for() -> Any:
    functional.all_reduce(some(3), "sum", every())
    return [functional.all_reduce(some(3), "sum", every()) + 0]


@case(2)
def collectives_of_torch_distributed_nn() -> Any:
    x = some(4, 2).requires_grad_()
    found = [
        differentiable.all_reduce(x * 1),
        torch.cat(differentiable.all_gather(x)),
        differentiable.broadcast(x * 1, 0),
        torch.cat(differentiable.all_to_all([torch.empty(2, 2) for _ in range(2)], list(x.split(2)))),
        differentiable.reduce_scatter(torch.empty(2, 2), list(x.split(2))),
        differentiable.all_to_all_single(torch.empty(4, 2), x),
    ]
    reduced = differentiable.reduce(x * 1, 0)  # on the other rank it is what each backend likes
    torch.stack([reduced.sum(), *[(each * each).sum() for each in found]]).sum().backward()
    return [*found, *([] if rank() else [reduced]), x.grad]


# -- torch.compile: "aot_eager" traces as the default does, and starts no C++ compiler -------------------------------


@case(2)
def compiled_collectives() -> Any:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: Any) -> Any:
        y = x * 2
        dist.all_reduce(y)
        gathered = torch.empty(2 * y.shape[0], *y.shape[1:])
        dist.all_gather_into_tensor(gathered, y)
        scattered = torch.empty_like(y)
        dist.reduce_scatter_tensor(scattered, gathered)
        exchanged = torch.empty_like(gathered)
        dist.all_to_all_single(exchanged, gathered)
        return y, gathered, scattered, exchanged

    return list(compiled(some(4, 2)))


@case(2)
def messages_where_the_compiled_graph_breaks() -> Any:
    @torch.compile(backend="aot_eager")
    def compiled(x: Any, got: Any) -> Any:
        batch = [dist.P2POp(dist.isend, x, other()), dist.P2POp(dist.irecv, got, other())]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        return got + 1

    return [compiled(some(3), torch.empty(3))]


def trained(model: Any) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (model(some(4, 8, seed=step)) ** 2).mean().backward()
        optimizer.step()
    return list(model.parameters())


def layers() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))


@case(2)
def compiled_data_parallel() -> Any:
    return trained(torch.compile(DistributedDataParallel(layers()), backend="aot_eager"))


@case(2)
def data_parallel_of_a_compiled_module() -> Any:
    return trained(DistributedDataParallel(torch.compile(layers(), backend="aot_eager")))


@case(2)
def data_parallel_made_within_a_compiled_function() -> Any:
    """Its constructor is where the graph breaks: the compiler comes by all that it calls."""

    @torch.compile(backend="aot_eager")
    def made(x: Any) -> Any:
        y = x * 2
        dist.broadcast(y, 1)
        work = dist.all_reduce(y, async_op=True)
        work.wait()
        dist.barrier()
        return y + 1

    return [made(some(3)), *trained(DistributedDataParallel(layers()))]
