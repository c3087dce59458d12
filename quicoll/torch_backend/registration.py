"""The backend "quicoll" is made known to torch.distributed, at every `import torch` where quicoll is installed.

So this may neither raise nor take time: torch would refuse to be imported for the first, and every program would pay
for the second. It imports nothing of quicoll and starts nothing. What a group needs is imported when one is made.
"""

from __future__ import annotations

import logging
from typing import Any

from quicoll.torch_backend.names import BACKEND

__all__ = ["register_backend"]


def register_backend() -> None:
    """Make "quicoll" a backend of torch.distributed, for the CPU and for CUDA. Nothing where that cannot be done."""
    try:
        from torch.distributed import Backend, is_available

        if is_available() and BACKEND.upper() not in Backend._plugins:  # noqa: SLF001 - torch has no other way to ask
            Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception as error:  # whatever a version of torch may do, its import has to go on
        logging.getLogger("quicoll").info("torch.distributed does not take the backend %s: %s", BACKEND, error)


def _create(options: Any, _: Any) -> Any:
    """Make a process group, as torch asks for one."""
    from quicoll.torch_backend.process_group import create

    return create(options)
