"""The worker against a job whose steps end as a script says: what is applied, begun again, saved and resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from quicoll import checkpoint
from quicoll.collectives.shards import Leaves, Shards
from quicoll.data import Feed, Position, Sampler
from quicoll.errors import CheckpointError, JobDone, LocalError, Mismatch, Partitioned, StepAborted, Terminated
from quicoll.numerics.seed import Seed
from quicoll.train import Bucket, CheckpointPolicy, Part, Task, Worker, final_result
from quicoll.train.checkpointer import Checkpointer
from quicoll.train.packing import unpacked_state

if TYPE_CHECKING:
    from quicoll.checkpoint.parts import Array


class Counting:
    """A task whose state says which gradients were applied, in float32 that is exact."""

    def __init__(self, **said: Any) -> None:
        self.weights = np.zeros(2, np.float32)
        self.asked: list[tuple[int, int]] = []
        self.backward_of: list[int] = []
        self.said = said

    def architecture(self) -> Mapping[str, Any]:
        return self.said

    def parameters(self) -> Mapping[str, Array]:
        return {"weights": self.weights, "bias": np.zeros((1, 1), np.float32)}

    def forward(self, part: Part) -> Part:
        self.asked.append((part.shard, part.step))
        return part

    def backward(self, loss: Part) -> Sequence[Array]:
        self.backward_of.append(loss.shard)
        return [np.full(2, loss.step, np.float32), np.full((1, 1), loss.shard, np.float32)]

    def apply(self, average: Sequence[Array]) -> None:
        self.weights = self.weights * np.float32(2) + np.asarray(average[0])

    def state(self) -> Mapping[str, Array]:
        return {"weights": self.weights}

    def load_state(self, state: Mapping[str, Array]) -> None:
        self.weights = np.array(state["weights"])


class Job:
    """Stands in for `quicoll.job.Job`: one rank, steps that commit, or end with the next of `troubles`."""

    def __init__(self, *, rank: int = 0, world_size: int = 1, troubles: Sequence[Exception | None] = ()) -> None:
        self.rank = rank
        self.world_size = world_size
        self.committed_step = 0
        self.state_torn = False
        self.group = self
        self.node = f"n{rank}"
        self.view = SimpleNamespace(view_id=1, nodes=tuple(f"n{each}" for each in range(world_size)))
        self.config = SimpleNamespace(timeout=30.0)
        self.state: tuple[Callable[[], Any], Callable[[Any], None]] | None = None
        self.doubtful: list[Step] = []
        self.sigterm: list[str] = []
        self._troubles = list(troubles)
        self.seed = Seed(5)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.barriers: list[int] = []
        self.registered: dict[str, Any] = {}

    async def barrier(self) -> None:
        self.barriers.append(self.committed_step + 1)

    def emit(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def shards(self, total: int) -> Shards:
        bounds = [rank * total // self.world_size for rank in (self.rank, self.rank + 1)]
        return Shards(total=total, first=bounds[0], count=bounds[1] - bounds[0], view_id=1)

    async def all_reduce(self, x: Leaves, *, op: str, algorithm: str) -> Any:
        assert op == "avg"
        return np.mean(x.values, axis=0) if x.values else np.zeros_like(x.like)

    async def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.world_size

    def register_state(self, save: Callable[[], Any], load: Callable[[Any], None], **options: Any) -> None:
        self.state, self.registered = (save, load), options

    def resume_from(self, step: int, *, source: str = "") -> None:
        self.committed_step = step

    async def ready(self) -> None:
        if self.doubtful:
            self._commit(self.doubtful.pop())

    def step(self, *, overlap: bool) -> Step:
        assert not overlap
        return Step(self)

    @contextmanager
    def stop_at_sigterm(self) -> Iterator[None]:
        self.sigterm.append("asks")
        yield
        self.sigterm.append("is as before")

    def _end(self, step: Step) -> None:
        trouble = self._troubles.pop(0) if self._troubles else None
        if isinstance(trouble, Partitioned):
            self.doubtful.append(step)
        if trouble is not None:
            raise trouble
        self._commit(step)

    def _commit(self, step: Step) -> None:
        self.committed_step += 1
        for action in step.actions:
            action()


class Step:
    """One attempt at a step of `Job`."""

    def __init__(self, job: Job) -> None:
        self.number = job.committed_step + 1
        self.actions: list[Callable[[], object]] = []
        self.on_commit = self.actions.append
        self._job = job

    async def __aenter__(self) -> Step:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self._job._end(self)

    async def ready(self) -> None:
        """It has begun."""


def saved_steps(directory: Path, pattern: str = "*.manifest.json") -> list[int]:
    """The steps of the complete checkpoints."""
    return sorted(int(path.name[5:13]) for path in directory.glob(pattern))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written on the loop and not in threads, so that `turns` is enough time for them."""

    async def here(saver: Checkpointer, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    monkeypatch.setattr(Checkpointer, "_in_thread", here)


async def turns(step: int) -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def trained(steps: int) -> Counting:
    """The state after `steps` undisturbed steps."""
    task = Counting()
    for step in range(1, steps + 1):
        task.apply([np.full(2, step, np.float32)])
    return task


def worker(job: Any, task: Task, **options: Any) -> Worker:
    if "data" not in options:
        options = {"shards": 4} | options
    return Worker(job, task, **options)


async def train(
    job: Job,
    task: Task,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    checkpoint_dir: Path | None = None,
    checkpoint_every: int = 0,
    keep: int = 3,
    **options: Any,
) -> Any:
    if checkpoint_dir is not None:
        options["checkpoints"] = CheckpointPolicy(checkpoint_dir, every=checkpoint_every, keep=keep)
    return await worker(job, task, **options).run(steps=steps, epochs=epochs)


def saved_task(found: checkpoint.Checkpoint | None) -> str:
    """The digest of the task's state in a checkpoint."""
    assert found is not None
    return checkpoint.digest(unpacked_state(found)["task"])


async def test_an_aborted_step_leaves_no_trace_and_is_begun_again() -> None:
    troubles = [None, StepAborted("lost b", lost=("b",)), StepAborted("again"), None, None]
    task = Counting()
    result = await train(Job(troubles=troubles), task, steps=5)
    assert result.digest == checkpoint.digest(trained(5).state())
    assert (result.steps, result.committed, result.aborted, result.resumed_from) == (5, 5, 2, None)
    assert [step for shard, step in task.asked if shard == 0] == [1, 2, 2, 2, 3, 4, 5]


@pytest.mark.parametrize("doubtful", [1, 3])
async def test_a_step_in_doubt_that_turns_out_committed_is_applied_once_and_not_run_again(doubtful: int) -> None:
    task = Counting()
    troubles = [None] * (doubtful - 1) + [Partitioned("cut off after the vote")]
    told: list[int] = []
    result = await train(Job(troubles=troubles), task, steps=3, on_step=told.append)
    assert result.digest == checkpoint.digest(trained(3).state())
    assert [step for shard, step in task.asked if shard == 0] == [1, 2, 3]
    assert told == [1, 2, 3]
    assert (result.steps, result.committed, result.aborted) == (3, 3, 0)


async def test_a_rank_that_no_quorum_took_in_for_the_hold_timeout_says_so() -> None:
    class Alone(Job):
        async def ready(self) -> None:
            raise Partitioned("no quorum for 600 s")

    with pytest.raises(Partitioned, match="no quorum"):
        await train(Alone(), Counting(), steps=1)


async def test_a_rank_that_comes_after_the_last_step_runs_none() -> None:
    class Late(Job):
        async def ready(self) -> None:
            assert self.state is not None
            self.state[1](worker(self, trained(4)).state())
            self.committed_step = 4

    task = Counting()
    result = await train(Late(), task, steps=4)
    assert (result.digest, task.asked) == (checkpoint.digest(trained(4).state()), [])


class Over(Job):
    """Its other ranks have ended."""

    async def ready(self) -> None:
        raise JobDone("the job is done", step=4)


async def test_a_rank_that_comes_when_the_job_is_done_takes_the_final_state_from_its_checkpoint(tmp_path: Path) -> None:
    whole = await train(Job(), Counting(), steps=4, checkpoint_dir=tmp_path, checkpoint_every=4)
    late = Counting()
    job = Over()
    job.resume_from = lambda step, source: None  # the checkpoint came after it had looked
    result = await train(job, late, steps=4, checkpoint_dir=tmp_path, checkpoint_every=4)
    assert (result.steps, result.committed, result.digest) == (4, 0, whole.digest)
    assert late.weights.tolist() == trained(4).weights.tolist()
    again = Counting()
    assert (await final_result(again, JobDone("done", step=4), tmp_path)).digest == whole.digest
    assert again.weights.tolist() == trained(4).weights.tolist()


async def test_where_there_is_no_checkpoint_of_the_final_step_that_is_said_and_nothing_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await train(Job(), Counting(), steps=3, checkpoint_dir=tmp_path, checkpoint_every=3)
    for directory, said in (
        (tmp_path, "no checkpoint of step 4; the newest is of step 3"),
        (None, "no directory of checkpoints"),
    ):
        late, caught = Counting(), None
        try:
            await final_result(late, JobDone("done", step=4), directory)
        except JobDone as error:
            caught = error
        assert caught is not None
        assert (caught.step, caught.code) == (4, 0)
        assert f"the final state is not at hand here: {said}" in str(caught)
        assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [caught.message]
        caplog.clear()
        assert late.weights.tolist() == Counting().weights.tolist()


async def test_an_error_that_trying_again_cannot_mend_gets_out_and_nothing_was_applied() -> None:
    task = Counting()
    with pytest.raises(Mismatch):
        await train(Job(troubles=[Mismatch("other code")]), task, steps=5)
    assert checkpoint.digest(task.state()) == checkpoint.digest(Counting().state())


async def test_a_rank_computes_its_own_shards_and_none_more_than_once() -> None:
    task = Counting()
    await train(Job(rank=1, world_size=2), task, steps=2)
    assert task.asked == [(2, 1), (3, 1), (2, 2), (3, 2)]


async def test_random_numbers_are_those_of_the_step_and_the_shard_on_whichever_rank_it_is() -> None:
    class Drawing(Counting):
        def forward(self, part: Part) -> Part:
            drawn[part.step, part.shard] = int(part.seed)
            return super().forward(part)

    seen = []
    for world_size in (1, 2):
        drawn: dict[tuple[int, int], int] = {}
        for rank in range(world_size):
            await train(Job(rank=rank, world_size=world_size), Drawing(), steps=2)
        seen.append(drawn)
    assert seen[0] == seen[1]
    assert len(set(seen[0].values())) == 8


async def test_a_rank_without_shards_takes_part_all_the_same() -> None:
    task = Counting()
    result = await train(Job(rank=0, world_size=5), task, steps=1)
    assert result.committed == 1
    assert task.weights.shape == (2,)


@pytest.mark.parametrize(("most", "sizes"), [(0, [3]), (12, [3]), (11, [2, 1]), (1, [2, 1])])
async def test_gradients_travel_in_buckets_of_at_most_so_many_bytes(most: int, sizes: list[int]) -> None:
    seen: list[int] = []

    class Watched(Job):
        async def all_reduce(self, x: Leaves, *, op: str, algorithm: str) -> Any:
            seen.append(x.values[0].size)
            return await super().all_reduce(x, op=op, algorithm=algorithm)

    task = Counting()
    await train(Watched(), task, steps=1, bucket_bytes=most)
    assert seen == sizes
    assert task.weights.tobytes() == trained(1).weights.tobytes()


async def test_on_step_is_called_after_each_commit_and_awaited() -> None:
    seen: list[int] = []

    async def note(step: int) -> None:
        seen.append(step)

    await train(Job(troubles=[StepAborted("once")]), Counting(), steps=3, on_step=note)
    await train(Job(), Counting(), steps=2, on_step=lambda step: seen.append(-step))
    assert seen == [1, 2, 3, -1, -2]


@pytest.mark.usefixtures("at_once")
async def test_checkpoints_are_taken_at_multiples_and_at_the_end(tmp_path: Path) -> None:
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 3, "keep": 5, "on_step": turns}
    await train(Job(), Counting(), steps=7, **options)
    assert saved_steps(tmp_path) == [3, 6, 7]
    assert saved_task(checkpoint.of_step(tmp_path, 6)) == checkpoint.digest(trained(6).state())


async def test_training_waits_for_no_disk_but_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is due while a file is being written is begun after it, and the last state is saved whatever its number."""
    gate, begun = asyncio.Event(), []

    async def slow(saver: Checkpointer, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        begun.append(job.committed_step)
        await gate.wait()
        return function(*arguments, **options)

    job = Job()
    monkeypatch.setattr(Checkpointer, "_in_thread", slow)

    async def open_at_20(step: int) -> None:
        await turns(step)
        if step == 20:
            gate.set()

    await train(job, Counting(), steps=21, checkpoint_dir=tmp_path, checkpoint_every=2, on_step=open_at_20)
    assert begun[0] == 3  # after the step in whose body it was begun
    assert begun[1] >= 20
    assert saved_steps(tmp_path)[0] == 2
    assert saved_steps(tmp_path)[-1] == 21
    assert saved_task(checkpoint.latest(tmp_path)) == checkpoint.digest(trained(21).state())


async def test_a_job_that_starts_anew_goes_on_from_the_checkpoint_to_the_same_bits(tmp_path: Path) -> None:
    await train(Job(), Counting(), steps=4, checkpoint_dir=tmp_path, checkpoint_every=2)
    task = Counting()
    result = await train(Job(), task, steps=9, checkpoint_dir=tmp_path, checkpoint_every=2)
    assert (result.resumed_from, result.steps, result.committed) == (4, 9, 5)
    assert result.digest == checkpoint.digest(trained(9).state())


async def test_the_state_handed_to_others_is_the_live_one() -> None:
    job, task = Job(), Counting()
    await train(job, task, steps=3)
    assert job.state is not None
    save, load = job.state
    load(save() | {"task": {"weights": np.full(2, 7, np.float32)}})
    assert task.weights.tolist() == save()["task"]["weights"].tolist() == [7, 7]


@pytest.mark.usefixtures("at_once")
async def test_training_goes_on_without_a_checkpoint_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.mkdir()

    async def block(step: int) -> None:
        await turns(step)
        if step == 1:
            in_the_way.rmdir()
            in_the_way.write_text("no directory")
        if step == 4:
            assert "training goes on without this checkpoint" in caplog.text
            in_the_way.unlink()

    result = await train(Job(), Counting(), steps=4, checkpoint_dir=in_the_way, checkpoint_every=2, on_step=block)
    assert result.steps == 4
    assert saved_steps(in_the_way) == [4]


async def test_the_last_checkpoints_failure_is_raised_after_all_steps(tmp_path: Path) -> None:
    job = Job()

    def block(step: int) -> None:
        if step == 3:
            (tmp_path / "c").write_text("in the way")

    with pytest.raises(CheckpointError, match="checkpoint of step 4"):
        await train(job, Counting(), steps=4, checkpoint_dir=tmp_path / "c", checkpoint_every=4, on_step=block)
    assert job.committed_step == 4


async def test_numbers_that_make_no_sense_are_refused() -> None:
    for options in (
        {"steps": 0},
        {},
        {"steps": 1, "epochs": 1},
        {"epochs": 1},
        {"epochs": 0, "data": Sampler(8, batch_size=4, shards=4, seed=1)},
        {"steps": 1, "data": Sampler(8, batch_size=4, shards=4, seed=1), "shards": 2},
        {"steps": 1, "shards": None},
        {"steps": 1, "bucket_bytes": -1},
        {"steps": 1, "report_every": -1},
        {"steps": 1, "checkpoint_every": -1, "checkpoint_dir": Path("x")},
        {"steps": 1, "keep": 0, "checkpoint_dir": Path("x")},
    ):
        with pytest.raises(LocalError):
            await train(Job(), Counting(), **options)


def test_a_gradient_that_requires_grad_itself_is_refused_where_autograd_records() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    (gradient,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
    bucket = Bucket.of([gradient])
    with pytest.raises(LocalError, match=r"requires grad.*pass x.detach\(\)"):
        bucket.pack([gradient])
    with torch.no_grad():
        assert bucket.pack([gradient]).tolist() == [3.0, 3.0]
    assert bucket.pack([gradient.detach()]).tolist() == [3.0, 3.0]


class Stopped(Job):
    """A job that is asked to stop while step `after` is open."""

    def __init__(self, after: int, **options: Any) -> None:
        super().__init__(**options)
        self.after = after

    async def ready(self) -> None:
        if self.committed_step >= self.after:
            raise Terminated
        await super().ready()


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(("after", "saved"), [(5, [3, 5]), (3, [3]), (0, [])])
async def test_a_rank_0_that_is_asked_to_stop_saves_its_last_step_once_before_it_goes(
    after: int, saved: list[int], tmp_path: Path
) -> None:
    job = Stopped(after)
    (tmp_path / "c").mkdir()
    with pytest.raises(Terminated):
        await train(job, Counting(), steps=9, checkpoint_dir=tmp_path / "c", checkpoint_every=3, on_step=turns)
    assert saved_steps(tmp_path / "c") == saved
    if saved:
        assert saved_task(checkpoint.latest(tmp_path / "c")) == checkpoint.digest(trained(after).state())


@pytest.mark.usefixtures("at_once")
async def test_a_state_that_is_half_overwritten_is_not_saved(tmp_path: Path) -> None:
    job = Stopped(5)
    job.state_torn = True
    with pytest.raises(Terminated):
        await train(job, Counting(), steps=9, checkpoint_dir=tmp_path, checkpoint_every=3, on_step=turns)
    assert saved_steps(tmp_path) == [3]


async def test_another_rank_that_is_asked_to_stop_saves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Terminated):
        await train(Stopped(2, rank=1, world_size=2), Counting(), steps=9, checkpoint_dir=tmp_path, checkpoint_every=3)
    assert saved_steps(tmp_path, "*") == []


async def test_a_last_checkpoint_that_fails_when_the_rank_is_asked_to_stop_is_an_error(tmp_path: Path) -> None:
    def block(step: int) -> None:
        (tmp_path / "c").write_text("in the way")

    with pytest.raises(CheckpointError, match="checkpoint of step 2"):
        await train(Stopped(2), Counting(), steps=9, checkpoint_dir=tmp_path / "c", checkpoint_every=3, on_step=block)


async def test_sigterm_asks_as_long_as_the_loop_runs_and_no_longer() -> None:
    job = Job()
    await train(job, Counting(), steps=2, on_step=lambda step: job.sigterm.append(str(step)))
    assert job.sigterm == ["asks", "1", "2", "is as before"]


# -- data ------------------------------------------------------------------------------------------------------------


class Means(Counting):
    """A task whose gradient is the mean of its samples' numbers; what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Part] = []

    def parameters(self) -> Mapping[str, Array]:
        return {"weights": self.weights}

    def backward(self, loss: Part) -> Sequence[Array]:
        assert loss.indices is not None
        self.given.append(loss)
        return [np.full(2, loss.indices.mean(), np.float32)]

    def apply(self, average: Sequence[Array]) -> None:
        self.weights = self.weights + np.asarray(average[0])


def sampler(length: int = 10, **options: Any) -> Sampler:
    return Sampler(length, **({"batch_size": 4, "shards": 4, "seed": 5} | options))


async def test_it_trains_on_each_sample_once_in_an_epoch_whatever_is_aborted() -> None:
    data, task = sampler(), Means()
    troubles = [None, StepAborted("lost"), Partitioned("cut off after the vote"), StepAborted("lost"), None]
    result = await train(Job(troubles=troubles), task, data=data, epochs=2)
    assert (result.steps, result.committed, result.aborted, data.position) == (6, 6, 2, Position(2, 0))
    used: dict[int, list[int]] = {}
    for part in task.given:  # an attempt that is repeated has the same samples
        assert part.indices is not None
        used.setdefault(part.step, [])
        used[part.step] += [index for index in part.indices.tolist() if index not in used[part.step]]
    for steps in (range(1, 4), range(4, 7)):
        assert sorted(index for step in steps for index in used[step]) == list(range(10))


async def test_the_average_is_that_of_the_samples_also_where_shards_have_different_numbers_of_them() -> None:
    """Ten samples, four a step in four shards: the last step has two, in two shards, and two without any."""
    task = Means()
    await train(Job(), task, data=sampler(shuffle=False), steps=3)
    assert task.weights.tolist() == [1.5 + 5.5 + 8.5] * 2


async def test_parts_have_the_samples_that_a_feed_brings() -> None:
    class Tens(Means):
        def forward(self, part: Part) -> Part:
            assert part.samples == [10 * index for index in np.asarray(part.indices).tolist()]
            return super().forward(part)

    class Loader:
        def __init__(self, lists: Any) -> None:
            self.lists = lists

        def __iter__(self) -> Iterator[list[int]]:
            return ([10 * index for index in indices] for indices in self.lists)

    data = sampler()
    result = await train(Job(), Tens(), data=Feed(data, Loader), epochs=1)
    assert (result.steps, result.figures.samples, data.epoch) == (3, 10, 1)


async def test_where_the_data_stands_is_in_the_checkpoint(tmp_path: Path) -> None:
    whole, half = Means(), Means()
    await train(Job(), whole, data=sampler(), epochs=3)
    await train(Job(), half, data=sampler(), steps=4, checkpoint_dir=tmp_path, checkpoint_every=2)
    data, again = sampler(seed=6), Means()
    result = await train(Job(), again, data=data, epochs=3, checkpoint_dir=tmp_path, checkpoint_every=2)
    assert (result.resumed_from, result.steps, data.epoch) == (4, 9, 3)
    assert again.weights.tobytes() == whole.weights.tobytes()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"data": sampler(11)}, "length is 11 here and was 10"),
        ({"data": sampler(batch_size=8)}, "batch_size is 8 here and was 4"),
        ({"data": sampler(batch_size=2, shards=2)}, "shards is 2 here and 4 in the job"),
        ({}, "of a worker with data, this one has none"),
    ],
)
async def test_other_data_than_the_checkpoints_is_refused(tmp_path: Path, changed: Any, said: str) -> None:
    await train(Job(), Counting(), data=sampler(), steps=2, checkpoint_dir=tmp_path, checkpoint_every=2)
    job, task = Job(), Counting()
    with pytest.raises(LocalError, match=said):
        await train(job, task, steps=4, checkpoint_dir=tmp_path, checkpoint_every=2, **changed)
    assert (job.committed_step, task.weights.tolist()) == (0, [0, 0])


# -- the architecture --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Counting(layers=3), "layers is 3 here and 2 in the job"),
        (Counting(layers=2, rate=0.1), "rate is 0.1 here and not there in the job"),
    ],
)
async def test_a_worker_that_trains_something_else_is_told_what_differs(other: Counting, said: str) -> None:
    job = Job()
    await train(job, Counting(layers=2), steps=1)
    assert job.state is not None
    late = Job()
    late.ready = lambda: _handed(late, job)
    with pytest.raises(LocalError, match=f"does not train what the job trains .*: {said}$"):
        await train(late, other, steps=2)
    assert other.weights.tolist() == [0, 0]


async def _handed(late: Job, job: Job) -> None:
    assert late.state is not None
    assert job.state is not None
    late.state[1](job.state[0]())


async def test_a_checkpoint_of_another_architecture_is_refused(tmp_path: Path) -> None:
    await train(Job(), Counting(layers=2), steps=2, checkpoint_dir=tmp_path, checkpoint_every=2)
    with pytest.raises(LocalError, match="layers is 3 here and 2 in the job"):
        await train(Job(), Counting(layers=3), steps=4, checkpoint_dir=tmp_path, checkpoint_every=2)


async def test_what_is_no_state_of_a_worker_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, step=4, tensors={"weights": np.ones(2, np.float32)})
    with pytest.raises(LocalError, match="no state of a worker: it has 'weights'"):
        await train(Job(), Counting(), steps=4, checkpoint_dir=tmp_path)
    with pytest.raises(LocalError, match="no state of a worker"):
        await final_result(Counting(), JobDone("done", step=4), tmp_path)


async def test_gradients_that_are_not_the_parameters_are_refused() -> None:
    class Fewer(Counting):
        def backward(self, loss: Part) -> Sequence[Array]:
            return super().backward(loss)[:1]

    with pytest.raises(LocalError, match="1 gradients for 2 parameters"):
        await train(Job(), Fewer(), steps=1)


# -- barriers and figures ----------------------------------------------------------------------------------------------


async def test_where_asked_no_rank_begins_backward_before_all_have_ended_forward() -> None:
    task = Counting()

    class Watched(Job):
        async def barrier(self) -> None:
            assert (len(task.asked), len(task.backward_of)) == (4 * len(self.barriers) + 4, 4 * len(self.barriers))
            await super().barrier()

    job = Watched()
    result = await train(job, task, steps=3, phase_barrier=True)
    assert job.barriers == [1, 2, 3]
    assert result.digest == checkpoint.digest(trained(3).state())


async def test_without_being_asked_there_is_no_barrier() -> None:
    job, task = Job(), Counting()
    await train(job, task, steps=1)
    assert job.barriers == []
    assert task.backward_of == [0, 1, 2, 3]


async def test_figures_say_where_the_time_went() -> None:
    loop = asyncio.get_running_loop()
    real, ahead = loop.time, [0.0]
    loop.time = lambda: real() + ahead[0]

    class Slow(Counting):
        def forward(self, part: Part) -> Part:
            ahead[0] += 100.0
            return super().forward(part)

        def apply(self, average: Sequence[Array]) -> None:
            ahead[0] += 1000.0
            super().apply(average)

    class SlowNetwork(Job):
        async def all_reduce(self, x: Leaves, *, op: str, algorithm: str) -> Any:
            ahead[0] += 600.0
            return await super().all_reduce(x, op=op, algorithm=algorithm)

    class SlowData(Sampler):
        def take(self, *arguments: Any) -> Any:
            ahead[0] += 40.0
            return super().take(*arguments)

    job = SlowNetwork(troubles=[None, StepAborted("lost")])
    data = SlowData(8, batch_size=4, shards=4, seed=1)
    try:
        result = await train(job, Slow(), data=data, steps=4, report_every=2)
    finally:
        del loop.time
    figures = result.figures
    assert (figures.steps, figures.aborted, figures.samples) == (4, 1, 16)
    assert figures.step_seconds == pytest.approx(2040, rel=0.01)
    assert figures.communication_seconds == pytest.approx(2400, rel=0.01)
    assert figures.lost_seconds == pytest.approx(1040, rel=0.01)
    assert figures.communication_share == pytest.approx(600 / 2040, rel=0.01)
    assert figures.data_share == pytest.approx(40 / 2040, rel=0.01)
    assert figures.samples_per_second == pytest.approx(16 / 9200, rel=0.01)
    assert [(kind, fields["step"], fields["epoch"]) for kind, fields in job.events] == [
        ("progress", 2, 1),
        ("progress", 4, 2),
    ]
    assert job.events[1][1]["samples_per_s"] == pytest.approx(8 / (4080 + 1040), abs=0.001)
