"""What torch.compile leaves alone: the methods that torch calls, and all that they call.

A compiled program that calls an operation outside of what it could compile (DDP's constructor and reducer, a `send`)
comes into our methods with its compiler at work, and that takes every Python function with tensors for its own. It
fails in these: a process group is an object whose attributes it may not read. C++ backends have no such functions.

torch's way to say so, `torch.compiler.disable`, imports the compiler, which takes a second or more and hundreds of
modules. What it does in the end is two marks, and they can be set without it: one at the function's code, for where it
is called from outside of what is compiled; and one at the function, for where the compiler would take it into the
function that it compiles, as `work.wait()` in the middle of one: there it breaks the graph.
"""

from __future__ import annotations

import logging
import types
from typing import Any, TypeVar

import torch

__all__ = ["untraced"]

Kind = TypeVar("Kind", bound=type)


def untraced(kind: Kind) -> Kind:
    """Mark all methods of a class, but not those of its bases. Nothing where torch has no such mark.

    Args:
        kind: The class, which is returned.
    """
    try:
        frames: Any = torch._C._dynamo.eval_frame  # noqa: SLF001 - see above
        skip = frames._FrameAction.SKIP  # noqa: SLF001 - likewise
        leave = frames._FrameExecStrategy(skip, skip)  # noqa: SLF001 - likewise: this frame, and what it calls
        for member in vars(kind).values():
            method = member.fget if isinstance(member, property) else member
            if isinstance(method, types.FunctionType):
                frames.set_code_exec_strategy(method.__code__, leave)
                method._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001 - likewise
    except AttributeError as error:
        logging.getLogger("quicoll").info("torch.compile is not kept from compiling %s: %s", kind.__name__, error)
    return kind
