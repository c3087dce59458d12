"""What torch.compile leaves alone: the methods that torch's C++ calls while a compiled function runs.

DDP that is compiled as a whole calls its group from C++ (to broadcast how it has laid out its buckets), and to
torch.compile that is one more Python function to read. It would not get far: a process group is opaque to it, which
torch 2.14 says by an error ("Attempted to access unregistered member"), and an operation is nothing to be compiled.

`torch.compiler.disable` says the same, but it imports the compiler, a second or more that most programs never need. So
the code of the methods is marked, as that does in the end. Where a version of torch has no such mark, nothing is done.
"""

from __future__ import annotations

from types import FunctionType

__all__ = ["leave_uncompiled"]


def leave_uncompiled(*kinds: type) -> None:
    """Have torch.compile run the methods of classes, and whatever they call, as they are.

    Args:
        kinds: The classes; not those that they come from.
    """
    try:
        from torch._C._dynamo import eval_frame
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy

        skipped = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        for kind in kinds:
            for member in vars(kind).values():
                function = member.fget if isinstance(member, property) else member
                if isinstance(function, FunctionType):
                    eval_frame.set_code_exec_strategy(function.__code__, skipped)
    except (ImportError, AttributeError, TypeError):  # of another version: compiled programs are few
        return
