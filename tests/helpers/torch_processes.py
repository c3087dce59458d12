"""How tests start programs of torch's."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
HELPERS = ROOT / "tests" / "helpers"


def environment() -> dict[str, str]:
    """This process's, without what a launcher says."""
    others = ("QUICOLL_", "SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "RANK", "WORLD_SIZE", "MASTER_", "LOCAL_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    path = os.environ.get("PYTHONPATH") or os.pathsep.join([str(ROOT), str(ROOT / "transport")])
    # Its own directory is none where Python is told to be safe, as for what runs with the compiled modules.
    return {**kept, "PYTHONPATH": os.pathsep.join([path, str(HELPERS)]), "OMP_NUM_THREADS": "1"}
