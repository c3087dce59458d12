"""Calls that are prepared once: what is looked up is what preparing anew gives, bounded, and ends with its view."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from quicoll.collectives.base import MOST_PREPARED, GroupView, PreparedCalls
from quicoll.collectives.context import CallContext
from quicoll.collectives.group import Group
from quicoll.collectives.movements import Barrier, Broadcast
from quicoll.collectives.reductions import AllReduce, Reduce, ReduceScatter
from quicoll.collectives.shards import Leaves, Shards
from quicoll.collectives.subgroups import WORLD
from quicoll.engine.calls import Known
from quicoll.errors import LocalError
from quicoll.membership.view import Member, View
from quicoll.numerics.canonical_order import leaves_of
from quicoll.plan.network import NetworkModel

if TYPE_CHECKING:
    from quicoll.collectives.operation import Operation

VIEW, WORLD_SIZE = 7, 3
NETWORK = NetworkModel(latency=((1e-4,) * 3,) * 3, rate=((1e8,) * 3,) * 3, sites=(0, 0, 0))


def place(prepared: PreparedCalls | None = None) -> GroupView:
    here = GroupView(VIEW, WORLD, 1, tuple(range(WORLD_SIZE)), (0,) * WORLD_SIZE, 64)
    return here if prepared is None else replace(here, prepared=prepared)


def leaves(here: GroupView, total: int, value: Any) -> Leaves[Any]:
    mine = leaves_of(here.rank, here.world_size, total)
    return Leaves(Shards(total, mine.start, len(mine), VIEW), [value] * len(mine), value)


def any_call(chance: random.Random) -> Callable[[GroupView], Operation[Any]]:
    """A call of a small world of them, so that the same ones and nearly the same ones come again and again."""
    shape = chance.choice([(6,), (3, 2), (2, 3)])
    kind = chance.choice(["float32", "float64"])
    tensor = np.ones(shape, kind) if chance.random() < 0.7 else torch.ones(shape, dtype=getattr(torch, kind))
    options: dict[str, Any] = {"op": chance.choice(["sum", "avg"]), "algorithm": chance.choice(["auto", "direct"])}
    how = chance.randrange(4)
    if how == 0:
        options["exact"] = True
    elif how == 1:
        options["precision"] = chance.choice(["default", "exact"])
    total = chance.choice([None, 3, 5])
    match chance.randrange(6):
        case 0 | 1:
            listed = [tensor] if chance.random() < 0.3 else tensor
            if how == 2:
                options["wire"] = "bfloat16"
            elif how == 3:
                options |= {"reduce_order": "ring", "algorithm": "auto"}
            return lambda here: AllReduce(here, listed if total is None else leaves(here, total, listed), **options)
        case 2:
            root = chance.randrange(2)
            return lambda here: Reduce(
                here, tensor if total is None else leaves(here, total, tensor), root=root, **options
            )
        case 3:
            counts = chance.choice([None, (shape[0], 0, 0), (0, shape[0], 0)])
            return lambda here: ReduceScatter(here, tensor, counts=counts, **options)
        case 4:
            root, algorithm = chance.randrange(2), chance.choice(["auto", "tree"])
            return lambda here: Broadcast(here, tensor, root=root, algorithm=algorithm)
        case _:
            return Barrier


def meaning(operation: Operation[Any]) -> tuple[Any, ...]:
    """All that the others and the engine see of a call before it has run."""
    if operation.announced:
        sizes, payload = operation.call().sizes, operation.payload()
        return operation.signature, operation.measures, operation.text(), operation.terms(), sizes, payload
    work = operation.prepare(Known([()] * WORLD_SIZE, NETWORK))
    sizes = [(each.size, str(each.dtype)) if isinstance(each, np.ndarray) else each.size for each in work.inputs]
    seen = [operation.signature, operation.measures, operation.text(), operation.terms()]
    run = [work.plan, work.dtype, work.acc, work.op, work.output.size, str(work.output.dtype)]
    return (*seen, *run, sizes)


def differences(prepared: PreparedCalls, *, calls: int = 1500) -> int:
    """How many of many calls came to something else than the same call prepared anew."""
    chance = random.Random(1)
    found = 0
    for _ in range(calls):
        call = any_call(chance)
        found += meaning(call(place(prepared))) != meaning(call(place()))
    return found


def test_a_call_that_is_looked_up_is_the_call_that_would_be_prepared_anew() -> None:
    few, enough = PreparedCalls(5), PreparedCalls()
    assert differences(few) == 0
    assert differences(enough) == 0
    assert len(few) == 5
    assert 100 < len(enough) <= MOST_PREPARED


def parts(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """The parts of a key, with what a reduction was asked for one by one."""
    *before, asked = key
    return (*before, *asked) if isinstance(asked, tuple) and len(asked) == 7 else key


@pytest.mark.parametrize("position", range(1, 11))  # behind the name, which what follows tells apart as well
def test_a_key_that_left_any_of_its_parts_out_would_give_another_calls_plan(position: int) -> None:
    class Careless(PreparedCalls):
        def get(self, key: tuple[Any, ...], prepare: Callable[..., Any], *given: Any) -> Any:
            key = parts(key)
            return super().get((*key[:position], *key[position + 1 :]), prepare, *given)

    assert fails(Careless()), "this part of a key makes no difference, or no call of this test needs it"


def fails(prepared: PreparedCalls) -> bool:
    try:
        return differences(prepared, calls=500) > 0
    except (ValueError, AttributeError, TypeError, AssertionError, LocalError):
        return True  # what was looked up is of another kind of call


def test_no_more_are_kept_than_allowed_and_the_oldest_make_room() -> None:
    prepared, made = PreparedCalls(4), []

    def get(number: int) -> int:
        def prepare() -> int:
            made.append(number)
            return number

        return prepared.get((number,), prepare)

    assert [get(number) for number in range(10)] == list(range(10))
    assert len(prepared) == 4
    made.clear()
    assert [get(number) for number in (6, 7, 8, 9)] == [6, 7, 8, 9]
    assert made == []
    get(5)
    assert made == [5]
    get(6)
    assert made == [5, 6]


def test_threads_that_prepare_at_once_each_get_their_own_and_the_bound_holds() -> None:
    prepared = PreparedCalls(3)

    def get(first: int) -> bool:
        return all(prepared.get((each,), partial(str, each)) == str(each) for each in [*range(first, first + 7)] * 300)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(get, range(4)))
    assert len(prepared) == 3


def test_what_cannot_be_prepared_raises_each_time_and_is_not_kept() -> None:
    here = place()
    for _ in range(2):
        for options in ({"op": "median"}, {"op": []}, {"algorithm": "guess"}, {"wire": "int4"}, {"precision": {}}):
            with pytest.raises(LocalError):
                AllReduce(here, np.ones(3), **options)
        with pytest.raises(LocalError, match="is not a rank"):
            Broadcast(here, np.ones(3), root=3)
    assert len(here.prepared) == 0


def test_the_same_call_again_is_neither_checked_nor_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    here = place()
    first = AllReduce(here, np.ones(3), op="avg", algorithm="direct").call().signature

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("prepared again")

    monkeypatch.setattr("quicoll.collectives.reductions._prepare", never)
    assert AllReduce(here, np.zeros(3), op="avg", algorithm="direct", out=np.ones(3)).call().signature == first
    with pytest.raises(AssertionError, match="prepared again"):
        AllReduce(here, np.zeros(3), op="max", algorithm="direct")


def view(number: int) -> View:
    members = (Member(rank=0, node="a", incarnation=1), Member(rank=1, node="b", incarnation=1))
    return View(view_id=number, members=members, seed=bytes(32), committed_step=0, committed_view=0)


def test_what_was_prepared_ends_with_the_view_and_is_each_groups_own() -> None:
    loop = SimpleNamespace(call_soon_threadsafe=lambda *_: None)
    engine, runtime = SimpleNamespace(divide=None, near=lambda view: None), SimpleNamespace(loop=loop)
    context = CallContext(SimpleNamespace(node="b", chunk_bytes=1024), engine, runtime, view(1))
    group = Group(context)
    here = group._here
    AllReduce(here, np.ones(3))
    assert group._here is here
    assert len(here.prepared) == 1
    assert len(group.subgroup([1], "mine")._here.prepared) == 0
    context.enter(view(2))
    assert group._here is not here
    assert len(group._here.prepared) == 0
