"""What launchers say of a process in its environment: torchrun, then srun, then mpirun, then Kubernetes.

The first that says something is believed, value by value. So torchrun under srun is torchrun's: srun counts its agents
there, not the ranks. A batch script of Slurm's has the variables of a task too, though it is none; what srun starts has
the number of its step beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Given", "launch_name", "master_of", "node_of", "on_one_host", "rank_of", "under_torchrun", "world_size_of"]


@dataclass(frozen=True, slots=True)
class Given:
    """A value, and the variables that it comes from.

    Attributes:
        value: As it stands in the environment.
        source: Their names.
    """

    value: str
    source: str


_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "JOB_COMPLETION_INDEX")
_WORLDS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_HOSTS = (
    ("WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
_STEPS = ("SLURM_STEP_ID", "SLURM_STEPID")


def rank_of(environ: Mapping[str, str]) -> Given | None:
    """Return the rank, from 0; None where no launcher says one."""
    return _first(environ, _RANKS)


def node_of(environ: Mapping[str, str]) -> Given | None:
    """Return the name of the node that follows from the rank."""
    rank = rank_of(environ)
    return None if rank is None else Given(f"worker-{rank.value}", rank.source)


def world_size_of(environ: Mapping[str, str]) -> Given | None:
    """Return how many ranks were launched together."""
    return _first(environ, _WORLDS)


def master_of(environ: Mapping[str, str]) -> Given | None:
    """Return where torchrun's ranks meet, as "host:port"."""
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    if host is None or port is None:
        return None
    return Given(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "MASTER_ADDR, MASTER_PORT")


def under_torchrun(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun has started this process, so that its store is there to meet at."""
    needed = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(environ.get(name) for name in needed)


def on_one_host(environ: Mapping[str, str]) -> bool:
    """Return whether a launcher says that all ranks are on this host."""
    for world, local in _HOSTS:
        if environ.get(world):
            return environ.get(world) == environ.get(local)
    if any(environ.get(name) for name in _STEPS):
        return (environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES")) == "1"
    return False


def launch_name(environ: Mapping[str, str]) -> str:
    """Return a name that the ranks of one launch share, and those of another have not, as far as there is one."""
    if run := environ.get("TORCHELASTIC_RUN_ID"):
        return f"torchrun-{run}"
    step = next((environ[name] for name in _STEPS if environ.get(name)), None)
    if step is not None:
        return f"slurm-{environ.get('SLURM_JOB_ID', '')}.{step}-{environ.get('SLURM_RESTART_COUNT', '0')}"
    for name in ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID"):
        if environ.get(name):
            return f"mpi-{environ[name]}"
    return "ranks"


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> Given | None:
    for name in names:
        if name.startswith("SLURM_") and not any(environ.get(step) for step in _STEPS):
            continue
        if environ.get(name):
            return Given(environ[name], name)
    return None
