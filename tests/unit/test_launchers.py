"""What launchers say of a process, and which of them is believed."""

from __future__ import annotations

import pytest

from quicoll import Config
from quicoll.launchers import launch_name, on_one_host, rank_of, under_torchrun, world_size_of

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "x1",
}  # fmt: skip
SRUN = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "1",
}  # fmt: skip
MPIRUN = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}


@pytest.mark.parametrize(
    ("environ", "rank", "world_size", "source"),
    [
        (TORCHRUN, 3, 4, "RANK"),
        (SRUN, 1, 2, "SLURM_PROCID"),
        (MPIRUN, 2, 3, "OMPI_COMM_WORLD_RANK"),
        ({"PMI_RANK": "1", "PMI_SIZE": "5"}, 1, 5, "PMI_RANK"),
        ({"JOB_COMPLETION_INDEX": "6"}, 6, None, "JOB_COMPLETION_INDEX"),
        ({**SRUN, **TORCHRUN}, 3, 4, "RANK"),  # srun counts torchrun's agents
        ({**MPIRUN, **SRUN}, 1, 2, "SLURM_PROCID"),
    ],
)
def test_the_settings_of_a_rank_follow_its_launcher(
    environ: dict[str, str], rank: int, world_size: int | None, source: str
) -> None:
    config = Config.resolve(environ=environ, listen="127.0.0.1:0")
    assert (config.node, config.rank_hint, config.world_size) == (f"worker-{rank}", rank, world_size)
    assert config.sources["node"] == config.sources["rank_hint"] == source
    config = Config.resolve(environ={**environ, "QUICOLL_NODE": "a"}, world_size=9, listen="127.0.0.1:0")
    assert (config.node, config.world_size) == ("a", 9)


def test_a_batch_script_of_slurms_is_no_task() -> None:
    environ = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert rank_of(environ) is None
    assert world_size_of(environ) is None


def test_whether_all_ranks_are_on_this_host() -> None:
    assert not on_one_host(TORCHRUN)
    assert on_one_host({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"})
    assert on_one_host(SRUN)
    assert not on_one_host({**SRUN, "SLURM_STEP_NUM_NODES": "2"})
    assert on_one_host(MPIRUN)
    assert not on_one_host({})


def test_two_launches_have_different_names() -> None:
    again = {**SRUN, "SLURM_RESTART_COUNT": "1"}
    names = [launch_name(each) for each in (TORCHRUN, SRUN, again, {**SRUN, "SLURM_STEP_ID": "1"}, {})]
    assert len(set(names)) == len(names)


def test_torchrun_is_known_by_its_store_and_its_run() -> None:
    assert under_torchrun(TORCHRUN)
    assert not under_torchrun({name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_RUN_ID"})
