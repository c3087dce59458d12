"""The same operations and training loops over Gloo and over quicoll, by the same processes: do they give the same?

    torch_beside_gloo.py CASES RESULTS      CASES: torch_cases_functional or torch_cases_training

A case is a function of one of these modules, marked with how many ranks it needs; it gives a list of tensors. For each
number of ranks, processes are forked from this one, which has imported everything; they run all cases over Gloo, then
over quicoll. RESULTS gets, by case, how the two compare on each rank: "equal" in every bit, "near" where Gloo adds more
than two numbers in another order and the case's name says so, or what is wrong.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["CASES", "case", "rank", "same_everywhere", "some", "world"]

BACKENDS = ("gloo", "quicoll")
Case = Callable[[], Any]
CASES: dict[int, dict[str, Case]] = {}


def case(ranks: int, named: str = "") -> Callable[[Case], Case]:
    """Mark a case."""

    def mark(function: Case) -> Case:
        CASES.setdefault(ranks, {})[named or function.__name__] = function
        return function

    return mark


def rank() -> int:
    return dist.get_rank()


def world() -> int:
    return dist.get_world_size()


def some(*shape: int, seed: int = 0) -> Any:
    """Numbers that differ from rank to rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * seed + rank()))


def same_everywhere(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * seed))


def outcome(run: Case) -> Any:
    """What a case gives, or why it fails."""
    torch._dynamo.reset()
    try:
        return [each.detach().clone() for each in run()]
    except Exception:
        return traceback.format_exc()


def compared(gloo: Any, quicoll: Any, *, near: bool) -> str:
    for name, given in (("Gloo", gloo), ("quicoll", quicoll)):
        if isinstance(given, str):
            return f"over {name}: {given}"
    if [(x.dtype, x.shape) for x in gloo] != [(x.dtype, x.shape) for x in quicoll]:
        return f"{[(x.dtype, x.shape) for x in gloo]} over Gloo, {[(x.dtype, x.shape) for x in quicoll]} over quicoll"
    if all(map(torch.equal, gloo, quicoll)):
        return "equal" if gloo else "nothing"
    if near and all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(gloo, quicoll, strict=True)):
        return "near"
    return f"{gloo} over Gloo, {quicoll} over quicoll"


def work(number: int, ranks: int, place: Path) -> None:
    """One process: all cases over each backend."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, list[Any]] = {name: [] for name in CASES[ranks]}
    for backend in BACKENDS:
        dist.init_process_group(
            backend, init_method=f"file://{place}/{backend}{ranks}", rank=number, world_size=ranks,
            timeout=timedelta(seconds=120),
        )  # fmt: skip
        for name, run in CASES[ranks].items():
            found[name].append(outcome(run))
        dist.destroy_process_group()
    said = {name: compared(*both, near=name.endswith("near")) for name, both in found.items()}
    (place / f"{ranks}-{number}.json").write_text(json.dumps(said))


def main() -> None:
    sys.modules["torch_beside_gloo"] = sys.modules[__name__]  # the cases register here, and not in a second copy
    importlib.import_module(sys.argv[1])
    importlib.import_module("quicoll.torch_backend")  # where it is not installed
    importlib.import_module("quicoll.torch_backend.process_group")  # once, not by each rank
    results: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="beside-gloo-") as given:
        place = Path(given)
        for ranks, cases in CASES.items():
            started = torch.multiprocessing.start_processes(
                work, (ranks, place), nprocs=ranks, join=False, start_method="fork"
            )
            while not started.join():
                pass
            said = [json.loads((place / f"{ranks}-{number}.json").read_text()) for number in range(ranks)]
            results |= {f"{name} ({ranks} ranks)": sorted({each[name] for each in said}) for name in cases}
    Path(sys.argv[2]).write_text(json.dumps(results))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
