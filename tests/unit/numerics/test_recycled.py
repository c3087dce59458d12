"""Memory of results is used again when nothing refers to it, and never before."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import mmap
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quicoll.numerics.buffers import source, uninitialised
from quicoll.numerics.bundle import bundle, results
from quicoll.numerics.destinations import allocate, destination
from quicoll.numerics.dtypes import FLOAT32
from quicoll.numerics.recycled import LEAST_RECYCLED, Recycler

SIZE = LEAST_RECYCLED
Array = np.ndarray[Any, Any]


def address(value: Any) -> int:
    return int(value.data_ptr() if isinstance(value, torch.Tensor) else value.__array_interface__["data"][0])


def tensor(flat: Array) -> torch.Tensor:
    return torch.from_numpy(flat.view(np.float32))


class Held:
    """Something with an attribute, in a circle with itself: the garbage collector's alone."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.own = self


class Export:
    """Speaks DLPack for a tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self._capsule = value.__dlpack__()

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> Any:
        return (1, 0)


def saved_by_autograd(flat: Array) -> Any:
    weight = torch.ones(SIZE // 4, requires_grad=True)
    return (weight * tensor(flat)).sum()


# Each takes the only array in a block, and gives what is to keep it alive.
KEEPERS: dict[str, Callable[[Array], Any]] = {
    "the array": lambda flat: flat,
    "a slice": lambda flat: flat[-3:],
    "an empty slice": lambda flat: flat[:0],
    "a chain of views": lambda flat: flat.view(np.float32).reshape(2, -1).T[::2][..., None].view(np.int32),
    "a field of a structured view": lambda flat: flat.view(np.dtype([("a", "u1"), ("b", "u1")]))["b"],
    "a broadcast": lambda flat: np.broadcast_to(flat[:1], (7,)),
    "strides of its own": lambda flat: np.lib.stride_tricks.as_strided(flat, (3,), (2,)),
    "an iterator": lambda flat: np.nditer(flat),
    "a flat iterator": lambda flat: flat.flat,
    "its base": lambda flat: flat.base,
    "an array of its base": lambda flat: np.asarray(flat.base),
    "a subclass": lambda flat: np.ma.masked_array(flat),
    "a memoryview": memoryview,
    "a cast memoryview": lambda flat: memoryview(flat)[5:].cast("B"),
    "a buffer that is read": lambda flat: np.frombuffer(flat.data, np.uint8, 4),
    "ctypes": lambda flat: (ctypes.c_char * 5).from_buffer(flat),
    "ctypes' view": lambda flat: flat.ctypes,
    "a pickle's buffer": lambda flat: pickle.PickleBuffer(flat),
    "a list": lambda flat: [{"deep": (flat,)}],
    "a closure": lambda flat: lambda: flat,
    "a circle": Held,
    "a tensor": tensor,
    "a view of a tensor": lambda flat: tensor(flat)[5:].view(-1, 1),
    "a detached tensor": lambda flat: tensor(flat).requires_grad_().detach(),
    "a tensor of another type": lambda flat: tensor(flat).view(torch.bfloat16),
    "a storage": lambda flat: tensor(flat).untyped_storage(),
    "a tensor set to its storage": lambda flat: torch.empty(0).set_(tensor(flat).untyped_storage()),
    "an array of a tensor": lambda flat: tensor(flat)[3:].numpy(),
    "a parameter": lambda flat: torch.nn.Parameter(tensor(flat)),
    "what autograd has saved": saved_by_autograd,
    "a capsule": lambda flat: torch.utils.dlpack.to_dlpack(tensor(flat)),
    "a tensor of a capsule": lambda flat: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(tensor(flat))),
    "an array of another's capsule": lambda flat: np.from_dlpack(Export(tensor(flat))),
    "numpy's capsule": lambda flat: flat.__dlpack__(),
}


@pytest.mark.parametrize("how", KEEPERS)
def test_memory_is_not_lent_while_anything_refers_to_it_and_lent_again_after(how: str) -> None:
    recycler = Recycler()
    flat = recycler.take(SIZE)
    where = address(flat)
    flat[:] = 7
    keeper = [KEEPERS[how](flat)]
    del flat
    gc.collect()
    assert recycler.kept == 0
    other = recycler.take(SIZE)
    assert abs(address(other) - where) >= SIZE
    other[:] = 9
    keeper.clear()
    gc.collect()
    assert recycler.kept == SIZE
    again = recycler.take(SIZE)
    assert address(again) == where
    assert again[0] == again[-1] == 7, "and nothing has written to it"


@pytest.mark.parametrize(
    "copied",
    [
        lambda flat: flat.copy(),
        lambda flat: copy.deepcopy(flat),
        lambda flat: pickle.loads(pickle.dumps(flat)),  # noqa: S301 - its own
        lambda flat: tensor(flat).clone(),
        lambda flat: tensor(flat).tolist()[:3],
        lambda flat: flat.tobytes(),
        lambda flat: torch.load(io.BytesIO(saved(tensor(flat)))),
        lambda flat: tensor(flat).share_memory_(),
    ],
    ids=["copy", "deepcopy", "pickle", "clone", "tolist", "tobytes", "save", "share_memory_"],
)
def test_a_copy_is_memory_of_its_own(copied: Callable[[Array], Any]) -> None:
    recycler = Recycler()
    flat = recycler.take(SIZE)
    flat[:] = 0
    kept = copied(flat)
    del flat
    gc.collect()
    assert recycler.kept == SIZE
    del kept


def saved(value: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_memory_begins_on_a_page_and_is_lent_for_its_own_size_alone() -> None:
    recycler = Recycler()
    sizes = [SIZE, SIZE + 1, 3 * SIZE]
    arrays = [recycler.take(size) for size in sizes]
    places = [address(each) for each in arrays]
    assert [place % mmap.PAGESIZE for place in places] == [0, 0, 0]
    assert [each.size for each in arrays] == sizes
    del arrays
    assert recycler.kept == sum(sizes)
    assert address(recycler.take(SIZE + 2)) not in places
    assert [address(recycler.take(size)) for size in reversed(sizes)] == places[::-1]


def test_no_more_is_kept_than_may_be_and_the_oldest_makes_room() -> None:
    recycler = Recycler(3 * SIZE)
    arrays = [recycler.take(SIZE) for _ in range(5)]
    places = [address(each) for each in arrays]
    for number in range(5):
        arrays[number] = None
        assert recycler.kept <= 3 * SIZE
    assert {address(each) for each in [recycler.take(SIZE) for _ in range(3)]} == {*places[2:]}
    large = recycler.take(4 * SIZE)
    kept = recycler.kept
    del large
    assert recycler.kept == kept, "what does not fit drives nothing out"


def test_a_closed_recycler_keeps_nothing_and_what_is_lent_stays() -> None:
    recycler = Recycler()
    held = recycler.take(SIZE)
    recycler.take(SIZE)
    assert recycler.kept == SIZE
    held[:] = 5
    recycler.close()
    assert recycler.kept == 0
    assert held.min() == 5
    del held
    assert recycler.kept == 0


def test_threads_that_take_and_drop_never_share_memory() -> None:
    recycler, wrong = Recycler(4 * SIZE), []

    def work(mark: int) -> None:
        for _ in range(200):
            mine = recycler.take(SIZE)
            mine[:: mmap.PAGESIZE] = mark
            if (mine[:: mmap.PAGESIZE] != mark).any():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
    assert recycler.kept <= 4 * SIZE


def like(kind: str, size: int) -> Any:
    return np.ones(size, np.float32) if kind == "numpy" else torch.ones(size)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_results_lie_in_memory_that_earlier_ones_have_left(kind: str, dtype: str) -> None:
    recycler = Recycler()
    if kind == "torch":
        value: Any = torch.zeros(3, SIZE // 4, dtype=getattr(torch, dtype))
    elif dtype == "bfloat16":
        value = source(torch.zeros(3, SIZE // 4, dtype=torch.bfloat16)).flat.reshape(3, -1)
    else:
        value = np.zeros((3, SIZE // 4), dtype)
    place = allocate(source(value), recycler=recycler)
    place.flat[:] = 1
    given = place.commit()
    del place
    where, row = address(given), given[1]
    assert type(given) is type(value)
    assert given.dtype == value.dtype
    assert given.shape == value.shape
    assert np.array_equal(source(given).flat, np.ones_like(source(value).flat))
    del given
    assert recycler.kept == 0
    assert address(allocate(source(value), recycler=recycler).commit()) != where
    kept = recycler.kept
    assert kept >= LEAST_RECYCLED  # a smaller one would be malloc's, which may do as it likes
    del row
    assert recycler.kept == 2 * kept
    assert address(allocate(source(value), recycler=recycler).commit()) == where


def test_one_tensor_of_a_list_keeps_the_memory_of_all() -> None:
    recycler = Recycler()
    for kind in ("numpy", "torch"):
        before = recycler.kept
        target = results(None, bundle([like(kind, SIZE // 8), like(kind, SIZE // 8)]), recycler=recycler)
        first, second = target.commit()
        del target, first
        assert recycler.kept < max(before, 1)
        assert second.shape[0] == SIZE // 8
        del second
        assert recycler.kept == SIZE


def test_small_results_are_none_of_it_and_a_buffer_beside_out_is() -> None:
    recycler = Recycler()
    small = allocate(source(np.ones(SIZE // 4 - 1, np.float32)), recycler=recycler)
    del small
    assert recycler.kept == 0
    out = np.ones(SIZE // 4, np.float32)
    beside = destination(out, source(out), recycler=recycler)
    beside.flat[:] = 2
    assert beside.commit() is out
    assert out.max() == 2
    del beside
    assert recycler.kept == SIZE
    aside = destination(out, source(out), apart_from=[], recycler=recycler).aside(recycler)
    assert recycler.kept == 0
    del aside
    assert uninitialised(SIZE // 4, FLOAT32, recycler).size == SIZE // 4


def test_a_result_may_be_used_as_any_other_tensor() -> None:
    recycler = Recycler()
    for dtype in (torch.float32, torch.bfloat16):
        value = torch.zeros(SIZE // 2, dtype=dtype)
        place = allocate(source(value), recycler=recycler)
        place.flat[:] = 0
        given = place.commit()
        given.requires_grad_()
        (given.float() * 3).sum().backward()
        assert given.grad is not None
        assert given.grad.max() == 3
        with torch.no_grad():
            given += 1
        assert given.detach_().max() == 1
