"""As much of torchcomms as torch looks for to take it for installed; a group of it cannot be made."""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["new_comm"]


def new_comm(*given: Any, **named: Any) -> NoReturn:
    raise AssertionError("a group was given to torchcomms")
