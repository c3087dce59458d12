"""The blocking face says of itself what the asynchronous one does, to people, to editors and to mypy."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, get_overloads

import pytest

import quicoll
import quicoll.blocking
from quicoll.collectives.blocking_group import Group

OPERATIONS = sorted(
    name
    for name, member in vars(quicoll.Group).items()
    if str(getattr(member, "__annotations__", {}).get("return", "")).startswith("Handle[") and not name.startswith("_")
)


def arguments(function: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_the_arguments_and_the_docstring_of_the_asynchronous_one(name: str) -> None:
    original, blocking = getattr(quicoll.Group, name), getattr(Group, name)
    *own, option = arguments(blocking)
    assert own == arguments(original)
    assert (option.name, option.default, option.kind) == ("async_op", False, inspect.Parameter.KEYWORD_ONLY)
    assert blocking.__doc__ == original.__doc__
    assert (blocking.__doc__ or "").count("Returns:") == 1


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_declared_with_its_result_and_with_a_handle_of_it(name: str) -> None:
    original = getattr(quicoll.Group, name)
    result = inspect.signature(original).return_annotation.removeprefix("Handle[").removesuffix("]")
    waits, overlaps = get_overloads(getattr(Group, name))
    for declared, literal, gives in ((waits, "False", result), (overlaps, "True", f"BlockingHandle[{result}]")):
        *own, option = arguments(declared)
        assert own == arguments(original)
        assert (option.name, option.annotation) == ("async_op", f"Literal[{literal}]")
        assert inspect.signature(declared).return_annotation == gives


@pytest.mark.parametrize("kind", ["Group", "Job", "Step"])
def test_the_blocking_face_has_every_public_name_with_its_docstring(kind: str) -> None:
    original, blocking = getattr(quicoll, kind), getattr(quicoll.blocking, kind)
    # `aclose`, `internals` and `for_threads` are what the blocking face itself, and tests, are made with.
    names = sorted(
        {name for name in dir(original) if not name.startswith("_")} - {"aclose", "for_threads", "internals"}
    )
    assert [name for name in names if not hasattr(blocking, name)] == []
    for name in names:
        assert getattr(blocking, name).__doc__ == getattr(original, name).__doc__


@pytest.mark.slow
def test_mypy_knows_the_result_of_every_operation(tmp_path: Path) -> None:
    """An error that is expected has `type: ignore`: strict mypy reports those that ignore nothing."""
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    root = Path(quicoll.__file__).parent.parent
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(root / ".mypy_cache"), str(snippet)]
    checked = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


SNIPPET = """
from typing import Any, assert_type
import numpy as np
import numpy.typing as npt
import torch
import quicoll
from quicoll import Handle, Shards, blocking
from quicoll.blocking import BlockingHandle

Floats = npt.NDArray[np.float32]

Tensors = list[torch.Tensor]

async def asynchronous(group: quicoll.Group, shards: Shards, a: Floats, t: torch.Tensor, many: Tensors) -> None:
    assert_type(group.all_reduce(a), Handle[Floats])
    assert_type(await group.all_reduce(a, op="max", wire="int8"), Floats)
    assert_type(await group.all_reduce(t), torch.Tensor)
    assert_type(await group.all_reduce(many), list[torch.Tensor])
    assert_type(await group.all_reduce(shards.leaves([a, a])), Floats)
    assert_type(await group.all_reduce(shards.leaves([many])), list[torch.Tensor])
    assert_type(await group.reduce(t), torch.Tensor | None)
    assert_type(await group.reduce_scatter(shards.leaves([t])), torch.Tensor)
    assert_type(await group.broadcast(many), list[torch.Tensor])
    assert_type(await group.all_gather(a), Floats)
    assert_type(await group.gather(a), Floats | None)
    assert_type(await group.scatter(t), torch.Tensor)
    assert_type(await group.all_to_all(many), list[torch.Tensor])
    assert_type(await group.recv(a, source=0), Floats)
    assert_type(await group.all_gather_object(1), list[Any])
    assert_type(await group.split(0), quicoll.Group | None)
    group.all_reduce(3.0)  # type: ignore[arg-type]
    group.all_gather(many)  # type: ignore[type-var]
    group.all_reduce(a, wire="int9")  # type: ignore[arg-type]
    group.send(a, nope=2)  # type: ignore[call-arg]

def synchronous(group: blocking.Group, shards: Shards, a: Floats, t: torch.Tensor, many: Tensors) -> None:
    assert_type(group.all_reduce(a), Floats)
    assert_type(group.all_reduce(a, async_op=False), Floats)
    assert_type(group.all_reduce(a, async_op=True), BlockingHandle[Floats])
    assert_type(group.all_reduce(shards.leaves([t]), async_op=True).wait(1.0), torch.Tensor)
    assert_type(group.broadcast(many, async_op=True).wait(), list[torch.Tensor])
    assert_type(group.gather(t), torch.Tensor | None)
    assert_type(group.all_gather_object({}, async_op=True), BlockingHandle[list[Any]])
    assert_type(group.split(1), blocking.Group | None)
    assert_type(group.split(1, async_op=True), BlockingHandle[blocking.Group | None])
    group.send(a, nope=2)  # type: ignore[call-overload]

def steps(job: blocking.Job) -> None:
    assert_type(job.rank, int)
    assert_type(job.ready(timeout=1.0), None)
    job.resume_from("one")  # type: ignore[arg-type]
    with job.step() as step:
        assert_type(step, blocking.Step)
"""
