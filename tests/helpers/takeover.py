"""Coordinators as processes that share a PostgreSQL journal, and ranks in this process that take steps with them."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from ports import named_port

import quicoll
import quicoll_transport
from quicoll.membership.operator_client import ask_for_ranks
from quicoll.membership.operators import OPERATOR, OperatorAnswer
from quicoll.membership.status_client import JobWatch
from quicoll_transport.security.authority import create_authority, issue
from quicoll_transport.security.identity import COORDINATOR, WORKER

if TYPE_CHECKING:
    from quicoll.membership.status import JobStatus

JOB = "takeover"
SOURCES = [str(Path(package.__file__ or "").resolve().parent.parent) for package in (quicoll, quicoll_transport)]
PATIENCE_S = 60.0  # of a test, for what takes a few seconds on a machine that has nothing else to do


class Cluster:
    """Certificates, addresses, coordinators by name; a context that ends what it has started."""

    def __init__(self, directory: Path, *, nodes: int, lost_after: float, lease: float) -> None:
        self.directory = directory
        self.nodes = [f"worker-{number}" for number in range(nodes)]
        self.lost_after, self.lease = lost_after, lease
        self.ports = {name: named_port() for name in "ab"}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.certs = directory / "certs"
        create_authority(self.certs, job=JOB, days=2)
        issue(self.certs, role=COORDINATOR, node=COORDINATOR, days=2)
        issue(self.certs, role=OPERATOR, node=OPERATOR, days=2)
        for node in self.nodes:
            issue(self.certs, role=WORKER, node=node, days=2)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    @property
    def addresses(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports.values())

    async def ask_for_ranks(self, first: str = "a") -> OperatorAnswer:
        """Ask, as an operator, for as many ranks as there are. first: the coordinator that is asked first."""
        asked = self._addresses_from(first)
        return await ask_for_ranks(len(self.nodes), coordinator=asked, certs=self.certs, timeout=PATIENCE_S)

    async def look(self, first: str = "a") -> tuple[str, JobStatus]:
        """Look at the job, as `quicoll status` does; return who has answered. first: as above."""
        async with JobWatch(self._addresses_from(first), self.certs) as watch:
            glance = await watch.look(PATIENCE_S)
        assert glance.status is not None, glance.trouble
        (name,) = (name for name, port in self.ports.items() if glance.coordinator == f"127.0.0.1:{port}")
        return name, glance.status

    def _addresses_from(self, first: str) -> str:
        ports = [self.ports[first], *(port for name, port in self.ports.items() if name != first)]
        return ",".join(f"127.0.0.1:{port}" for port in ports)

    def start(self, name: str, journal: str, *options: str) -> None:
        """Start a coordinator; its words are in the file `name`.log."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith("QUICOLL_")}
        environment |= {"PYTHONPATH": os.pathsep.join(SOURCES), "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", "quicoll.cli.main", "coordinator", "--job", JOB, "--certs", str(self.certs)]
        command += ["--journal", journal, "--world-size", str(len(self.nodes)), "--lost-after", str(self.lost_after)]
        command += ["--listen", f"127.0.0.1:{self.ports[name]}", "--lease", str(self.lease), "--seed", "5"]
        command += options
        with (self.directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=self.directory
            )

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def said(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def leader(self) -> str:
        """Return the name of who has said last, by its token, that it leads; "" where nobody has."""
        tokens = {name: re.findall(r"lease with token (\d+)", self.said(name)) for name in self.processes}
        return max((name for name in tokens if tokens[name]), key=lambda name: int(tokens[name][-1]), default="")

    async def until(self, done: Callable[[], bool], what: str) -> None:
        """Wait for a condition, and fail with what was waited for and the coordinators' words."""
        until = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > until:
                words = "".join(f"\n{name}: {self.said(name)[-1500:]}" for name in self.processes)
                raise AssertionError(f"not within {PATIENCE_S:g} s: {what}{words}")
            await asyncio.sleep(0.02)


class Ranks:
    """The ranks of a cluster, which count committed steps in their state until they are told to end."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.applied: dict[str, list[int]] = {node: [] for node in cluster.nodes}
        self._ends = False
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Ranks:
        self._tasks = [asyncio.create_task(self._train(node)) for node in self._cluster.nodes]
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        self._ends = True
        if kind is not None:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=kind is not None)

    @property
    def step(self) -> int:
        return max((steps[-1] for steps in self.applied.values() if steps), default=0)

    async def goes_on(self, steps: int = 3) -> None:
        """Wait for so many steps more, on every rank."""
        goal = self.step + steps
        await self._cluster.until(
            lambda: all(applied and applied[-1] >= goal for applied in self.applied.values()), f"step {goal}"
        )
        for task in self._tasks:
            if task.done():
                task.result()

    def check(self) -> None:
        """Every step was applied once, in its order, by every rank that was there: none lost, none twice."""
        for node, steps in self.applied.items():
            assert steps == list(range(1, len(steps) + 1)), (node, steps[-5:])

    async def _train(self, node: str) -> None:
        weights = np.zeros(4, np.float32)

        def load(state: Any) -> None:
            weights[:] = state["weights"]

        async with quicoll.join(
            coordinator=self._cluster.addresses,
            job=JOB,
            node=node,
            certs=self._cluster.certs,
            listen="127.0.0.1:0",
            handle_sigterm=False,
            timeout=60.0,
            hold_timeout=PATIENCE_S,
            join_timeout=PATIENCE_S,
        ) as job:
            job.register_state(lambda: {"weights": weights}, load)
            # All end after the same step, for a rank that is alone cannot commit.
            last = np.zeros(1, np.float32)
            while not last[0]:
                try:
                    async with job.step() as step:
                        ends = await job.group.all_reduce(np.full(1, self._ends, np.float32), op="max")
                        total = await job.group.all_reduce(np.full(4, step.number, np.float32), op="avg")

                        def commit(number: int = step.number, total: Any = total, ends: Any = ends) -> None:
                            weights[:] += total
                            last[:] = ends
                            self.applied[node].append(number)

                        step.on_commit(commit)
                    await asyncio.sleep(0.01)  # coordinators that start need the processor too
                except quicoll.LocalError:
                    raise
                except quicoll.QuicollError:
                    await asyncio.sleep(0.01)
            assert weights[0] == sum(self.applied[node])
