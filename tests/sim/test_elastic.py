"""4 -> 3 -> 8 -> 2 -> 4 workers, with the optimizer's state divided between them, and a sampler: all in one run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from elastic_task import STEPS, Elastic, train

from quicoll import checkpoint
from quicoll.sim import Recording, Settings, Simulation

if TYPE_CHECKING:
    from pathlib import Path

    from quicoll.job import Job
    from quicoll.sim import Outcome


def run(directory: Path, *, ranks: int, sizes: tuple[int, ...] = ()) -> tuple[Outcome, list[int]]:
    """Train, scaled to these sizes one after the other; the outcome, and of how many ranks the committed steps were."""
    recording = Recording()

    async def worker(job: Job) -> Any:
        task = Elastic()
        result = await train(job, task, directory)
        assert task.used.tolist() == np.ones_like(task.used).tolist()
        return result.digest, result.steps

    settings = Settings(ranks=ranks, limit=120.0)
    sim = Simulation(worker, seed=3, settings=settings, compute=0.1, recorder=recording.record)
    for number, size in enumerate(sizes):
        sim.at(0.6 * (number + 1)).scale(size)
    outcome = sim.run()
    worlds = {entry.what["view"]: entry.what["world_size"] for entry in told(recording, "view_installed")}
    return outcome, [worlds[entry.what["view"]] for entry in told(recording, "step_committed")]


def told(recording: Recording, kind: str) -> list[Any]:
    return [entry for entry in recording.entries if entry.kind == kind and entry.who == "coordinator"]


def tensors(directory: Path) -> dict[str, bytes]:
    """The whole of the last state, as it is in its checkpoint: parameters, counts, all moments, the data's position."""
    found = checkpoint.latest(directory)
    assert found is not None
    assert found.step == STEPS
    return {name: np.asarray(value).tobytes() for name, value in found.tensors.items()}


def test_four_three_eight_two_four_workers_have_the_bits_of_one_and_use_each_sample_once_in_an_epoch(
    tmp_path: Path,
) -> None:
    """S2, S8, C1: without a backup, so that whoever leaves hands over what it owns; no step is aborted for it."""
    alone, _ = run(tmp_path / "alone", ranks=1)
    assert alone.error is None, alone.error
    outcome, worlds = run(tmp_path / "elastic", ranks=4, sizes=(3, 8, 2, 4))
    assert outcome.error is None, outcome.error
    seen = iter(worlds)
    assert all(size in seen for size in (4, 3, 8, 2, 4)), worlds  # a larger one may come in two views
    assert (len(worlds), outcome.aborted) == (STEPS, 0)
    assert [result for result in outcome.results if result is not None] == [alone.results[0]] * 4
    expected = tensors(tmp_path / "alone")
    assert {"divided.m", "divided.v"} < set(expected)
    assert np.frombuffer(expected["divided.m"], np.float32).std() > 0
    assert tensors(tmp_path / "elastic") == expected
