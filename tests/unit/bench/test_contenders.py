"""What takes part in a benchmark is as its plan has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quicoll.bench.cases import Programme
from quicoll.bench.contenders import Quicoll, contenders
from quicoll.local import arena

JOB: Any = SimpleNamespace(world_size=2, group=SimpleNamespace(rank=0))


@pytest.mark.parametrize("work", ["allreduce", "sharded"])
@pytest.mark.parametrize("lent", [False, True])
async def test_what_is_reduced_lies_in_memory_that_others_read_where_the_plan_has_it_there(
    work: str, lent: bool
) -> None:
    here = arena.arena_here()
    if here is None:
        pytest.skip("this machine has no memory that its ranks could share")
    plan = Programme.of(work, sizes=(1 << 20,), lent=lent)
    (made,) = await contenders(plan, JOB)
    assert isinstance(made, Quicoll)
    for case in plan.cases:
        await made.prepare(case)
        assert bool(here.place(made._tensor)) is lent
        assert np.all(made._tensor == 1)
