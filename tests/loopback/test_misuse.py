"""What a caller may do wrong around the groups: each is an error of ours, at once, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quicoll
from quicoll import Event, Job, LocalError, PeerError, StepAborted, Terminated, blocking
from quicoll.membership.serving import serve
from quicoll.testing import cluster, cut_network
from quicoll.train import CheckpointPolicy, Part
from quicoll_transport.security.authority import create_authority, issue


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"n": 0}, "at least one rank"),
        ({"n": 1.5}, "must be an integer"),
        ({"n": 1, "lost_after": 0}, "lost_after must be above 0"),
        ({"n": 1, "lost_after": float("nan")}, "lost_after must be above 0"),
        ({"n": 1, "seed": -1}, "seed -1"),
        ({"n": 1, "incarnation": 0}, "an incarnation is from 1"),
        ({"n": 1, "incarnation": 1 << 63}, "an incarnation is from 1"),
        ({"n": 1, "chunk_bytes": 0}, "chunk_bytes"),
    ],
)
async def test_a_cluster_that_cannot_be_is_refused_and_leaves_no_thread(settings: dict[str, Any], said: str) -> None:
    before = threading.enumerate()  # a test before this one may have left one that ends by itself
    with pytest.raises(LocalError, match=said):
        await cluster(**settings).__aenter__()
    assert [thread.name for thread in threading.enumerate() if thread not in before] == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lost_after": 0}, "lost_after must be above 0"),
        ({"lost_after": float("nan")}, "lost_after must be above 0"),
        ({"world_size": 0}, "world_size 0"),
        ({"world_size": "two"}, "world_size must be an integer"),
        ({"seed": "x"}, "seed must be an integer"),
    ],
)
async def test_a_coordinator_that_cannot_be_is_refused_before_it_opens_anything(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    journal = tmp_path / "journal.db"
    options = {"job": "a", "certs": tmp_path, "journal": journal, "world_size": 1, **settings}
    with pytest.raises(LocalError, match=said):
        await serve(**options)
    assert not journal.exists()


async def test_a_cut_takes_a_time_that_is_one_and_a_network_that_is_there() -> None:
    async with cluster(1) as jobs:
        (job,) = jobs
        for seconds in (0, float("nan"), float("inf"), "x"):
            with pytest.raises(LocalError, match="how long the network is cut"):
                cut_network(job, seconds)
    with pytest.raises(LocalError, match="the job is closed"):
        cut_network(job, 1.0)


async def test_one_job_of_a_cluster_may_leave_and_the_others_go_on() -> None:
    async with cluster(3, lost_after=0.5) as jobs:
        await jobs[2].aclose()

        async def go_on(job: Job) -> int:
            while True:
                with suppress(StepAborted):
                    async with job.step():
                        return int((await job.group.all_reduce(np.ones(1)))[0])

        assert await asyncio.gather(*(go_on(job) for job in jobs[:2])) == [2, 2]


async def test_leaving_twice_is_leaving_and_later_calls_are_refused() -> None:
    async with cluster(1) as jobs:
        (job,) = jobs
        await job.aclose()
        await job.aclose()
        with pytest.raises(LocalError, match="closed"):
            await job.group.all_reduce(np.ones(1))
        for call in (job.ready, job.step().__aenter__):
            with pytest.raises(LocalError, match="closed"):
                await call()


async def test_who_awaits_what_another_cancelled_gets_an_error_and_no_cancellation_of_his_own() -> None:
    async with cluster(2) as jobs:
        handle = jobs[0].group.all_reduce(np.ones(3))

        async def wait() -> Any:
            return await handle

        cancelled, other = asyncio.create_task(wait()), asyncio.create_task(wait())
        await asyncio.sleep(0)
        cancelled.cancel()
        for awaited in (other, wait()):
            with pytest.raises(PeerError, match="cancelled by another await") as raised:
                await awaited
            assert (raised.value.rank, raised.value.node, raised.value.op) == (0, "worker-0", "all_reduce")
        assert cancelled.cancelled()


async def test_a_wait_with_a_time_limit_is_still_a_timeout() -> None:
    async with cluster(2) as jobs:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(jobs[0].group.barrier(), 0.05)


async def test_a_handle_belongs_to_its_loop() -> None:
    async with cluster(1) as jobs:
        handle = jobs[0].group.all_reduce(np.ones(3))

        async def wait() -> Any:
            return await handle

        def elsewhere() -> None:
            with pytest.raises(LocalError, match="another event loop"):
                asyncio.run(wait())

        await asyncio.to_thread(elsewhere)
        assert (await handle).tolist() == [1.0, 1.0, 1.0]


class Alone:
    """A job for synchronous code, of one rank or more; its coordinator has a thread of its own."""

    def __init__(self, certs: Path, nodes: str = "a") -> None:
        create_authority(certs, job="alpha")
        issue(certs, role="coordinator", node="coordinator")
        for node in nodes:
            issue(certs, role="worker", node=node)
        self._certs = certs
        self._world = len(nodes)
        self._listening = threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),))
        self._thread.start()
        self._listening.wait()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()

        def observe(event: Event) -> None:
            if event.kind == "listening":
                self._address = event.fields["address"]
                self._listening.set()

        settings: dict[str, Any] = {"listen": "127.0.0.1:0", "job": "alpha", "observer": observe}
        settings["world_size"] = self._world
        self._task = asyncio.create_task(serve(certs=self._certs, journal=self._certs / "journal.db", **settings))
        await asyncio.wait({self._task})

    def join(self, node: str = "a") -> AbstractContextManager[blocking.Job]:
        return blocking.join(**self.settings(node))

    def settings(self, node: str = "a") -> dict[str, Any]:
        return {"coordinator": self._address, "certs": str(self._certs), "node": node, "job": "alpha"}

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    made = Alone(tmp_path)
    yield made
    made.close()


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except LocalError as error:
        return str(error)
    return "not refused"


def test_a_blocking_job_is_used_by_its_thread_while_it_is_open(alone: Alone) -> None:
    refusals: list[str] = []
    with alone.join() as job:
        thread = threading.Thread(target=lambda: refusals.append(refusal(job.group.barrier)))
        thread.start()
        thread.join()

        async def within() -> None:
            refusals.append(refusal(job.group.barrier))

        asyncio.run(within())
        with job.step() as step:
            step.on_commit(lambda: refusals.append(refusal(job.group.barrier)))
        job.group.barrier()
    refusals.append(refusal(job.group.barrier))
    refusals.append(refusal(job.step().__enter__))
    said = [
        "for instance by a queue.Queue",
        "nothing may block; call it after that",
        "nothing may block",
        "the job is closed",
        "the job is closed",
    ]
    assert all(part in text for part, text in zip(said, refusals, strict=True)), refusals


def test_a_fork_of_a_blocking_job_is_refused_and_leaves_its_parent_alone(alone: Alone) -> None:
    read, write = os.pipe()
    child = None
    try:
        with alone.join() as job:
            if (child := os.fork()) == 0:
                os.write(write, refusal(job.group.barrier).encode())
                raise SystemExit  # through the end of the block, which is not this process's to leave
            os.close(write)
            with os.fdopen(read) as told:
                assert "a fork of the one that joined" in told.read()
            assert os.waitpid(child, 0) == (child, 0)
            for _ in range(3):
                with job.step():
                    assert job.group.all_reduce(np.ones(1)).tolist() == [1.0]
    except SystemExit:
        os._exit(0)
    finally:
        if child == 0:
            os._exit(1)


def test_a_blocking_call_that_is_interrupted_ends_the_block_in_time(alone: Alone) -> None:
    """Ctrl-C in a callback stands for one at any time: both reach the call as KeyboardInterrupt."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), alone.join() as job, job.step() as step:
        step.on_commit(interrupt)
    with alone.join() as job:
        job.group.barrier()


class Sum:
    """A task; what `at` does in its third step's forward pass."""

    def __init__(self, at: Callable[[], object] = lambda: None) -> None:
        self.found = np.zeros(2, np.float32)
        self.at = at

    def architecture(self) -> dict[str, Any]:
        return {}

    def parameters(self) -> dict[str, Any]:
        return {"found": self.found}

    def forward(self, part: Part) -> Part:
        if part.step == 3:
            self.at()
        return part

    def backward(self, loss: Part) -> list[Any]:
        return [np.full(2, loss.shard + loss.step, np.float32)]

    def apply(self, average: Any) -> None:
        self.found = self.found + average[0]

    def state(self) -> dict[str, Any]:
        return {"found": self.found}

    def load_state(self, state: Any) -> None:
        self.found = np.array(state["found"])


def test_a_blocking_worker_trains_in_one_call_and_goes_on_from_its_checkpoints(alone: Alone, tmp_path: Path) -> None:
    task, steps = Sum(), []
    policy = CheckpointPolicy(tmp_path / "saved", every=2)
    with alone.join() as job:
        worker = blocking.Worker(job, task, shards=2, checkpoints=policy, on_step=steps.append)
        result = worker.run(steps=3)
        assert (result.steps, result.committed, worker.figures.steps) == (3, 3, 3)
        assert worker.architecture.digest
        assert worker.state()["task"]["found"].tolist() == [7.5, 7.5]
        with job.step() as step:  # the job is there after it
            assert step.number == 4
    assert steps == [1, 2, 3]
    task = Sum()
    with alone.join() as job:
        result = blocking.Worker(job, task, shards=2, checkpoints=policy).run(steps=5)
    assert (result.resumed_from, result.steps, result.committed) == (3, 5, 2)
    assert task.found.tolist() == [17.5, 17.5]


def test_from_within_a_blocking_worker_no_call_may_wait_and_a_request_to_stop_ends_it(alone: Alone) -> None:
    said: list[str] = []

    def within() -> None:
        said.append(refusal(job.group.barrier))
        job.stop()

    task = Sum(within)
    with pytest.raises(Terminated), alone.join() as job:
        blocking.Worker(job, task, shards=2).run(steps=9)
    assert task.found.tolist() == [7.5, 7.5]
    assert len(said) == 2
    assert all("nothing may block" in each for each in said)


class Alarm(Exception):
    pass


def test_a_signal_handler_that_raises_ends_the_call_and_leaves_nothing_of_it_running(tmp_path: Path) -> None:
    """Here while rank a waits for the decision: the step stays in doubt, and is applied once when b has voted."""
    two = Alone(tmp_path, "ab")
    may_vote, applied = threading.Event(), []

    def alarm(*_: object) -> None:
        raise Alarm

    def other() -> None:
        with two.join("b") as job:
            with job.step():
                may_vote.wait()
            with job.step():
                job.group.barrier()

    def interrupt(job: blocking.Job) -> None:
        main = threading.main_thread().ident or 0
        # Not before its loop waits: what is raised inside a callback of asyncio's goes no further than its log.
        while job._inner._engine.steps.cast is None or sys._current_frames()[main].f_code.co_name != "select":
            pass
        signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, alarm)
    peer = threading.Thread(target=other)
    peer.start()
    try:
        with two.join("a") as job:
            with pytest.raises(Alarm), job.step() as step:  # noqa: PT012 - the end of the step raises
                step.on_commit(lambda: applied.append(1))
                threading.Thread(target=interrupt, args=(job,)).start()
            assert (applied, job.committed_step) == ([], 0)
            may_vote.set()
            with job.step() as step:
                assert applied == [1]
                job.group.barrier()
                step.on_commit(lambda: applied.append(2))
            assert applied == [1, 2]
    finally:
        signal.signal(signal.SIGUSR1, before)
        may_vote.set()
        peer.join()
        two.close()


async def test_an_out_that_is_changed_under_way_is_its_owners_error() -> None:
    def read_only(out: np.ndarray) -> None:
        out.flags.writeable = False

    def shorter(out: np.ndarray) -> None:
        out.resize(2, refcheck=False)

    async with cluster(2) as jobs:
        for change in (read_only, shorter):
            outs = [np.full(3, -1.0), np.full(3, -1.0)]
            handles = [job.group.all_reduce(np.ones(3), out=out) for job, out in zip(jobs, outs, strict=True)]
            change(outs[0])
            with pytest.raises(LocalError, match="out was changed while the operation was under way"):
                await handles[0]
            assert (await handles[1]).tolist() == [2.0] * 3
            assert set(outs[0].tolist()) == {-1.0}


async def test_sizes_that_no_memory_holds_are_refused_by_name() -> None:
    huge = np.broadcast_to(np.uint8(1), (1 << 50,))
    async with cluster(2) as jobs:
        for call in (jobs[0].group.broadcast, jobs[0].group.all_gather, jobs[0].group.all_reduce):
            with pytest.raises(LocalError, match=r"there is no memory for .*1125899906842624"):
                call(huge)
        with pytest.raises(LocalError, match="more than can be announced"):
            jobs[0].group.all_gather(np.empty((1 << 62, 0), np.uint8))
        rows = np.empty((1 << 60, 0), np.uint16)
        both = np.concatenate([rows, rows])

        async def gathered(job: Job) -> Any:
            return await job.group.all_gather(both)

        got = await asyncio.gather(*(gathered(job) for job in jobs), return_exceptions=True)
        assert [type(error) for error in got] == [LocalError, LocalError]
        assert "there is no memory for a result (4611686018427387904, 0)" in str(got[0])


async def test_shards_are_bounded_and_named_by_their_ends() -> None:
    async with cluster(1) as jobs:
        with pytest.raises(LocalError, match=r"at most 2\*\*31"):
            jobs[0].group.shards(1 << 70)
        with pytest.raises(LocalError, match="0 leaves for the 2147483648 shards of this rank, 0 to 2147483647 of"):
            jobs[0].group.shards(1 << 31).leaves([])


async def test_a_program_whose_executor_is_full_joins_and_leaves(alone: Alone) -> None:
    go_on = threading.Event()
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as full:
        loop.set_default_executor(full)
        busy = loop.run_in_executor(None, go_on.wait)
        async with quicoll.join(**alone.settings()) as job:
            assert (await job.group.all_reduce(np.ones(1))).tolist() == [1.0]
        go_on.set()
        await busy
