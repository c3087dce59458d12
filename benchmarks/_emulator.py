"""The emulator of links, which is a program and a module beside the project."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def load_emulator(path: Path) -> Any:
    """Return the module; ends the program where there is none."""
    spec = importlib.util.spec_from_file_location("wanem", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"there is no emulator at {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
