"""The blocking face says of itself what the asynchronous one does, to people, to editors and to mypy."""

from __future__ import annotations

import inspect
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
