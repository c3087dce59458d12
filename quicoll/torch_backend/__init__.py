"""quicoll by name in torch programs: `dist.init_process_group("quicoll")`. docs/torch_backend.md is the user's view.

Where the package is installed, torch finds the backend at its own import, by the entry point "torch.backends"; anywhere
else `import quicoll.torch_backend` makes it known. Nothing else of this room is imported, and no thread is started,
before a process group is made.

    registration    makes the name known; may never raise
    process_group   what torch holds: its own class over `methods`
    reconfiguration which processes a group is made of, and how that changes
    methods         torch's operations as operations of a group
    asked           torch's options and overloads, read; its tensors as flat memory and back
    work            the handle of an operation, as torch waits for it
    sessions        this process's part in a job: joined at torch's store, left at the end
    failures        quicoll's errors as classes that torch programs catch
    profiled        operations in torch's profiles
    supplied        two functional operations of torch's that would go past the group
    untraced        torch.compile leaves the methods alone
    pool            threads on which callbacks may block
    names           what it is called
"""

from __future__ import annotations

from quicoll.torch_backend.registration import register_backend

__all__: list[str] = []

register_backend()
