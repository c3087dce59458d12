"""The training worker in simulated clusters: who is refused, and the same bits through every change of the ranks."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from quicoll import checkpoint
from quicoll.checkpoint.catalogue import manifest_name
from quicoll.errors import Diverged, LocalError, ShardLost
from quicoll.sim import Settings, Simulation
from quicoll.tiers.tier_set import TierSet
from quicoll.train import CheckpointPolicy, Divide, Part, TorchTask, Worker

if TYPE_CHECKING:
    from pathlib import Path

    from quicoll.job import Job
    from quicoll.sim import Outcome
    from quicoll.train import Task

STEPS, SHARDS, SIZE = 30, 8, 37


pytestmark = pytest.mark.usefixtures("one_thread")


class Wave:
    """A task in numpy; what it was handed."""

    def __init__(self, size: int = SIZE, **said: Any) -> None:
        self.weights = np.zeros(size, np.float32)
        self.said = said
        self.loads = 0

    def architecture(self) -> Mapping[str, Any]:
        return self.said

    def parameters(self) -> Mapping[str, Any]:
        return {"weights": self.weights}

    def forward(self, part: Part) -> Part:
        return part

    def backward(self, loss: Part) -> Sequence[Any]:
        places = np.arange(len(self.weights), dtype=np.float32)
        return [np.sin(places * np.float32(loss.step + loss.shard)) + self.weights * np.float32(0.01)]

    def apply(self, average: Sequence[Any]) -> None:
        self.weights = self.weights - np.float32(0.1) * np.asarray(average[0])

    def state(self) -> Mapping[str, Any]:
        return {"weights": self.weights}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.loads += 1
        self.weights = np.array(state["weights"])


class Trainings:
    """What became of each rank: its task, how it ended."""

    def __init__(self, others: Mapping[str, Wave]) -> None:
        self.others = others  # by node
        self.tasks: dict[str, Wave] = {}
        self.errors: dict[str, Exception] = {}

    async def __call__(self, job: Job) -> Any:
        task = self.tasks[job.node] = self.others.get(job.node) or Wave(layers=2)
        try:
            await Worker(job, task, shards=SHARDS).run(steps=STEPS)
        except (LocalError, Diverged) as error:
            self.errors[job.node] = error
            return None
        return task.weights.tobytes()


def run(trainings: Trainings, ranks: int, script: Any = lambda sim: None, **settings: Any) -> Outcome:
    sim = Simulation(trainings, seed=3, settings=Settings(ranks=ranks, limit=60.0, **settings), compute=0.05)
    script(sim)
    return sim.run()


WRONG = [
    (lambda: Wave(layers=3), "'layers': 2 on {others} and 3 on {wrong}"),
    (
        lambda: Wave(SIZE + 1, layers=2),
        f"'parameter weights': float32 ({SIZE},) on {{others}} and float32 ({SIZE + 1},) on {{wrong}}",
    ),
]


def demand_refused(trainings: Trainings, wrong: str, others: str, what: str) -> None:
    said = what.format(others=others, wrong=wrong)
    assert {node: str(error) for node, error in trainings.errors.items()} == {
        wrong: f"this worker, {wrong}, does not train what the job trains: the first difference is in {said}. "
        "Nothing was handed over: make it the same on all ranks and start again"
    }
    assert trainings.tasks[wrong].loads == 0
    assert not trainings.tasks[wrong].weights.any()


@pytest.mark.parametrize(("other", "what"), WRONG)
def test_one_that_trains_something_else_is_refused_at_the_start_and_the_others_go_on(other: Any, what: str) -> None:
    """C1: by a setting that is in no tensor, and by a shape."""
    trainings = Trainings({"worker-2": other()})
    outcome = run(trainings, 4)
    demand_refused(trainings, "worker-2", "worker-0, worker-1, worker-3", what)
    assert (outcome.error, outcome.committed) == (None, STEPS)


@pytest.mark.parametrize(("other", "what"), WRONG)
def test_one_that_joins_a_running_job_with_something_else_is_refused(other: Any, what: str) -> None:
    trainings = Trainings({"worker-3": other()})
    outcome = run(trainings, 3, lambda sim: [sim.at(0.6).scale(4)])
    demand_refused(trainings, "worker-3", "worker-0, worker-1, worker-2", what)
    assert (outcome.error, outcome.committed, outcome.aborted) == (None, STEPS, 0)


@pytest.mark.parametrize(("other", "what"), WRONG)
def test_a_warm_spare_that_trains_something_else_is_refused_before_it_learns_anything(other: Any, what: str) -> None:
    trainings = Trainings({"worker-3": other()})
    outcome = run(trainings, 3, spares=1, warm_spares=1)
    demand_refused(trainings, "worker-3", "worker-0, worker-1, worker-2", what)
    assert (outcome.error, outcome.committed) == (None, STEPS)


def test_where_no_more_than_half_train_the_same_all_stop_with_one_message_and_nothing_was_handed_over() -> None:
    trainings = Trainings({"worker-1": Wave(layers=3)})
    run(trainings, 2)
    assert [type(error) for error in trainings.errors.values()] == [Diverged, Diverged]
    (said,) = {str(error) for error in trainings.errors.values()}
    assert "do not train the same (worker-0 | worker-1), and no more than half agree" in said
    assert "'layers': 2 on worker-0 and 3 on worker-1" in said
    assert [task.loads for task in trainings.tasks.values()] == [0, 0]


def test_whoever_comes_has_the_seed_of_those_that_are_there() -> None:
    """S3: from the start, later, or again after it was killed; derived by layer and token as by the others."""
    seen: dict[int, dict[str, int]] = {}
    tasks = []

    class Drawing(Wave):
        def __init__(self, job: Job) -> None:
            super().__init__()
            self.job = job

        def forward(self, part: Part) -> Part:
            drawn = int(self.job.seed.for_layer(3).for_token(part.shard).for_step(part.step)) ^ int(part.seed)
            for_part = seen.setdefault(part.step * SHARDS + part.shard, {})
            assert for_part.setdefault(self.job.node, drawn) == drawn
            return part

    async def one(job: Job) -> Any:
        tasks.append(Drawing(job))
        await Worker(job, tasks[-1], shards=SHARDS).run(steps=STEPS)

    sim = Simulation(one, seed=3, settings=Settings(ranks=3, limit=60.0), compute=0.05)
    sim.at(0.5).scale(4)
    sim.at_vote(1, start=0.8).crash(1)
    sim.at(1.1).restart(1)
    sim.at(4.0).heal()
    assert sim.run().error is None
    assert len(tasks) == 5
    assert all(len(set(drawn.values())) == 1 for drawn in seen.values())
    assert max(map(len, seen.values())) > 1  # a part that another rank computed after the kill
    assert len({next(iter(drawn.values())) for drawn in seen.values()}) == STEPS * SHARDS


# -- the optimizer's state divided between the ranks -------------------------------------------------------------------


class AdamWave(Wave):
    """The same with Adam, whole or divided; written out element by element, as numpy rounds it."""

    def __init__(self) -> None:
        super().__init__(optimizer="adam")
        self.moments = {"m": np.zeros(SIZE, np.float32), "v": np.zeros(SIZE, np.float32)}
        self.divided = False

    def divide(self) -> Mapping[str, str]:
        self.divided = True
        return {"m": "float32", "v": "float32"}

    def update(self, start: int, stop: int, average: Any, moments: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        m = moments["m"] * np.float32(0.9) + average * np.float32(0.1)
        v = moments["v"] * np.float32(0.99) + average * average * np.float32(0.01)
        return self.weights[start:stop] - np.float32(0.05) * m / (np.sqrt(v) + np.float32(1e-6)), {"m": m, "v": v}

    def advance(self, values: Sequence[Any]) -> None:
        self.weights = np.array(values[0])

    def apply(self, average: Sequence[Any]) -> None:
        assert not self.divided
        self.weights, found = self.update(0, SIZE, np.asarray(average[0]), self.moments)
        self.moments = dict(found)

    def state(self) -> Mapping[str, Any]:
        return {"weights": self.weights} | ({} if self.divided else self.moments)

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        if not self.divided:
            self.moments = {name: np.array(state[name]) for name in self.moments}


X = torch.linspace(-1, 1, 96).reshape(SHARDS * 4, 3)


def layers() -> TorchTask:
    """Two groups with settings of their own, one parameter without an optimizer, statistics, a scheduler."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1))
    first, last = module[0], module[2]
    groups = [{"params": [first.weight, first.bias], "weight_decay": 0.1}, {"params": [last.weight], "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)

    def loss(module: torch.nn.Module, part: Part) -> torch.Tensor:
        rows = X[4 * part.shard : 4 * part.shard + 4] * (1 + part.step % 5)
        return torch.as_tensor((module(rows) - rows.sum(1, keepdim=True)).square().mean())

    return TorchTask(module, optimizer, loss, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 7))


def bits(task: Task) -> bytes:
    state = task.state()
    held = state["module"] if "module" in state else {"weights": state["weights"]}
    return b"".join(np.asarray(held[name]).tobytes() for name in sorted(held))


def divided(made: Any, ranks: int, script: Any = lambda sim: None, **how: Any) -> Outcome:
    async def one(job: Job) -> Any:
        task = made()
        try:
            result = await Worker(job, task, shards=SHARDS, **how).run(steps=STEPS)
        except ShardLost as error:
            return str(error)
        return bits(task), result.digest

    sim = Simulation(one, seed=3, settings=Settings(ranks=ranks, limit=120.0), compute=0.1)
    script(sim)
    return sim.run()


def four_three_eight_two_four(sim: Simulation) -> None:
    sim.at(0.6).scale(3)
    sim.at(1.2).scale(8)
    sim.at(2.0).scale(2)
    sim.at(2.6).scale(4)


@pytest.fixture(scope="module", params=[AdamWave, layers], ids=["numpy", "torch"])
def task(request: pytest.FixtureRequest) -> Any:
    return request.param


def ends(outcome: Outcome) -> set[Any]:
    assert outcome.error is None, outcome.error
    return {result for result in outcome.results if result is not None}


def test_four_three_eight_two_four_workers_with_divided_moments_give_the_bits_of_one(task: Any) -> None:
    """S2, S8, C1: whoever leaves hands over what it owns; no step is aborted."""
    alone = ends(divided(task, 1, divide=Divide(16)))
    outcome = divided(task, 4, four_three_eight_two_four, divide=Divide(16, backup=0))
    assert ends(outcome) == alone
    assert (outcome.committed, outcome.aborted) == (STEPS, 0)


def test_a_worker_with_all_of_the_state_has_the_same_parameters() -> None:
    ((whole, _),) = ends(divided(AdamWave, 2))
    ((apart, _),) = ends(divided(AdamWave, 2, divide=Divide(5)))
    assert apart == whole


def test_a_killed_owner_is_replaced_by_its_backup() -> None:
    alone = ends(divided(AdamWave, 1, divide=Divide(16)))

    def script(sim: Simulation) -> None:
        sim.at(0.83).crash(1)
        sim.at(1.9).restart(1)

    assert ends(divided(AdamWave, 3, script, divide=Divide(16, backup=1))) == alone


def test_an_aborted_step_changes_nothing_of_a_divided_state_of_which_there_are_no_copies() -> None:
    """With copies what an attempt had spoilt would be found by its digest, and come from them."""

    def script(sim: Simulation) -> None:
        sim.at_vote(0, start=0.8).hold({0}, {"coordinator"})  # all is computed, and nothing decided
        sim.at(1.0).alarm(1, 0.01)  # it ends its view for nothing
        sim.at(1.015).alarm(1, 0.0)
        sim.at(1.1).heal()

    outcome = divided(AdamWave, 3, script, divide=Divide(16, backup=0))
    assert ends(outcome) == ends(divided(AdamWave, 1, divide=Divide(16)))
    assert outcome.aborted == 1


def test_without_a_backup_the_job_stops_and_says_what_is_lost() -> None:
    outcome = divided(AdamWave, 3, lambda sim: [sim.at(0.83).crash(1)], divide=Divide(16, backup=0))
    (said,) = {result for result in outcome.results if result is not None}
    assert "of 'optimizer' (m, v) as after step" in said
    assert "worker-1, which owned them, is not here" in said


def test_workers_that_divide_otherwise_are_refused_by_name() -> None:
    errors = {}

    async def one(job: Job) -> Any:
        blocks = 8 if job.node == "worker-1" else 16
        try:
            await Worker(job, AdamWave(), shards=SHARDS, divide=Divide(blocks)).run(steps=3)
        except LocalError as error:
            errors[job.node] = str(error)

    Simulation(one, seed=3, settings=Settings(ranks=3, limit=60.0), compute=0.1).run()
    assert list(errors) == ["worker-1"]
    assert "'divided': 37 elements in 16 blocks of (m: float32, v: float32), backup=1 on" in errors["worker-1"]


# -- nodes with disks of their own -------------------------------------------------------------------------------------


class Machines:
    """Lives of one job on machines with disks of their own: each is killed whole, and the next one finds the disks."""

    def __init__(self, place: Path, *, copies: int) -> None:
        self.place = place
        self.copies = copies
        self.began: dict[str, int | None] = {}

    def live(self, ranks: int, *, kill: float | None = None) -> Outcome:
        """One life, to its end, or until all processes are killed."""

        async def one(job: Job) -> Any:
            task = AdamWave()
            policy = CheckpointPolicy(self.place / job.node, every=4, shared=False, copies=self.copies)
            worker = Worker(job, task, shards=SHARDS, divide=Divide(16), checkpoints=policy)
            try:
                result = await worker.run(steps=STEPS)
            except ShardLost as error:
                return str(error)
            self.began[job.node] = result.resumed_from
            return bits(task), result.digest

        limit = 120.0 if kill is None else kill + 1.0
        sim = Simulation(one, seed=3, settings=Settings(ranks=ranks, limit=limit), compute=0.1)
        if kill is not None:
            for rank in range(ranks):
                sim.at(kill).crash(rank)
        return sim.run()

    def steps(self, node: str) -> list[int]:
        return [found.step for found in checkpoint.stored(self.place / node)]

    def lose(self, node: str) -> None:
        shutil.rmtree(self.place / node)


@pytest.mark.parametrize(
    ("ranks", "lost", "moved"),
    [
        (5, "worker-0", ""),  # a node was replaced, and two are new
        (3, "worker-1", ""),
        (2, "", ""),  # fewer: the third one's disk is gone with it
        (2, "worker-1", "worker-2"),  # and one of them stands on another machine now
    ],
)
def test_a_job_that_was_killed_whole_goes_on_from_what_is_on_any_of_its_disks(
    ranks: int, lost: str, moved: str, tmp_path: Path
) -> None:
    alone = ends(divided(AdamWave, 1, divide=Divide(16)))
    machines = Machines(tmp_path, copies=2)
    machines.live(3, kill=1.7)
    newest = machines.steps("worker-2")[0]
    assert 4 <= newest < STEPS
    if lost:
        machines.lose(lost)
    if moved:
        (tmp_path / moved).rename(tmp_path / lost)
    assert ends(machines.live(ranks)) == alone
    assert machines.began == {
        f"worker-{rank}": newest if rank < 3 and (moved or lost != f"worker-{rank}") else None for rank in range(ranks)
    }


def test_a_job_that_was_killed_as_its_manifest_was_written_goes_on_though_one_disk_alone_has_it(tmp_path: Path) -> None:
    """Each piece is on one disk, and two of the three disks know nothing of it."""
    alone = ends(divided(AdamWave, 1, divide=Divide(16)))
    machines = Machines(tmp_path, copies=1)
    machines.live(3, kill=1.7)
    newest = machines.steps("worker-2")[0]
    for node in ("worker-0", "worker-1"):
        (tmp_path / node / manifest_name(newest)).unlink()
    assert ends(machines.live(3)) == alone
    assert machines.began["worker-2"] == newest
    assert max(machines.began["worker-0"] or 0, machines.began["worker-1"] or 0) < newest


def test_a_begin_stops_the_job_with_the_name_of_what_is_on_no_disk(tmp_path: Path) -> None:
    machines = Machines(tmp_path, copies=1)
    machines.live(3, kill=1.7)
    newest = machines.steps("worker-2")[0]
    machines.lose("worker-1")
    outcome = machines.live(3)
    assert outcome.committed == 0
    (said,) = {result for result in outcome.results if result is not None}
    assert f"of 'optimizer' (m, v) as after step {newest}, from which the job goes on" in said
    assert "can be read on none of worker-0, worker-1, worker-2" in said


# -- tiers -------------------------------------------------------------------------------------------------------------


def test_a_set_of_tiers_changes_for_all_ranks_at_one_step_and_is_part_of_the_state() -> None:
    """S4, S4b: proposed on one rank; a rank that joins later has it before its first step."""
    seen: dict[str, dict[int, tuple[str, ...]]] = {}
    states = []

    class Tiered(Wave):
        def __init__(self, job: Job) -> None:
            super().__init__()
            self.job = job

        def forward(self, part: Part) -> Part:
            assert part.tiers is not None
            seen.setdefault(self.job.node, {})[part.step] = part.tiers.active
            if part.step == 5 and self.job.node == "worker-1" and self.job.tiers.pending is None:
                self.job.tiers.propose(part.tiers.changed(active=["dense", "experts"]))
            return part

    async def one(job: Job) -> Any:
        worker = Worker(job, Tiered(job), shards=SHARDS, tiers=TierSet(["dense"]))
        await worker.run(steps=STEPS)
        states.append(worker.state()["tiers"])

    sim = Simulation(one, seed=3, settings=Settings(ranks=2, limit=60.0), compute=0.1)
    sim.at(1.2).scale(3)
    assert sim.run().error is None
    (changed,) = {min(step for step, active in steps.items() if len(active) == 2) for steps in list(seen.values())[:2]}
    assert 5 < changed <= 7
    assert set(seen) == {"worker-0", "worker-1", "worker-2"}
    for steps in seen.values():
        assert all(active == (("dense",) if step < changed else ("dense", "experts")) for step, active in steps.items())
    assert states == [states[0]] * 3
