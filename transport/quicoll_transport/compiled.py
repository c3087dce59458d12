"""Whether the hot modules are compiled here: the same source, translated to C by mypyc, or read by the interpreter.

What they do and send is equal; only the time differs. It stands beside every figure that is about time.
"""

from __future__ import annotations

from typing import Final

__all__ = ["COMPILED"]

# This module is compiled with the others or not at all (pyproject.toml), so its own file tells.
COMPILED: Final[bool] = not __file__.endswith((".py", ".pyc"))
