"""Ranks as Ray actors in a placement group: `python examples/ray_train.py`, with Ray and quicoll installed.

The driver makes the job's certificates and starts the coordinator as an actor; each worker is an actor with its own
certificate and key, which go through Ray's object store, so who may read that may take part. An actor that is lost is
replaced by one of the same name: it joins, is handed the state of the others, and goes on with them.
"""

import argparse
import asyncio
import os
import signal
import tempfile
from pathlib import Path

import numpy as np
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import quicoll
from quicoll.membership.service import serve
from quicoll_transport.security.authority import create_authority, issue

JOB = "ray"


def files_of(certs: Path, *names: str) -> dict[str, bytes]:
    return {name: (certs / name).read_bytes() for name in names}


def written(files: dict[str, bytes]) -> str:
    """A directory of this process's alone with these files."""
    directory = Path(tempfile.mkdtemp(prefix="quicoll-ray-"))
    for name, data in files.items():
        with open(os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
    return str(directory)


@ray.remote(num_cpus=0)
class Coordinator:
    """On the driver's node. Its journal lasts as long as the actor; give it a path that outlives it for more."""

    async def start(self, files: dict[str, bytes], world_size: int) -> str:
        address = asyncio.get_running_loop().create_future()

        def observe(event: quicoll.Event) -> None:
            if event.kind == "listening":
                address.set_result(event.fields["address"])

        directory = written(files)
        self.serving = asyncio.create_task(
            serve(
                listen=f"{ray.util.get_node_ip_address()}:0",
                job=JOB,
                certs=directory,
                journal=Path(directory, "journal.sqlite"),
                world_size=world_size,
                observer=observe,
            )
        )
        await asyncio.wait({self.serving, address}, return_when=asyncio.FIRST_COMPLETED)
        if self.serving.done():
            self.serving.result()
        return str(await address)


@ray.remote(num_cpus=1)
class Worker:
    """One rank. What it trains is a vector that all ranks add to."""

    async def train(self, node: str, files: dict[str, bytes], coordinator: str, steps: int, pace: float) -> list[float]:
        state = {"sum": np.zeros(4), "steps": 0}
        async with quicoll.join(job=JOB, node=node, certs=written(files), coordinator=coordinator) as job:
            job.register_state(lambda: state, state.update)
            while True:
                await job.ready()
                if job.committed_step >= steps:
                    return [float(value) for value in state["sum"]]
                try:
                    async with job.step() as step:
                        total = await job.group.all_reduce(np.full(4, 1.0), op="avg")
                        step.on_commit(
                            lambda total=total: state.update(sum=state["sum"] + total, steps=job.committed_step)
                        )
                except quicoll.StepAborted:
                    continue  # a rank was lost; the next attempt is the same step
                await asyncio.sleep(pace)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--pace", type=float, default=0.1, help="seconds between two steps")
    parser.add_argument("--kill", type=int, help="kill this worker once, after a second, to see it replaced")
    options = parser.parse_args()
    nodes = [f"worker-{number}" for number in range(options.workers)]
    with tempfile.TemporaryDirectory() as temporary:
        certs = Path(temporary, "certs")
        create_authority(certs, job=JOB)
        issue(certs, role="coordinator", node="coordinator")
        for node in nodes:
            issue(certs, role="worker", node=node)
        own = {node: files_of(certs, "ca.pem", f"worker-{node}.pem", f"worker-{node}.key") for node in nodes}
        files = files_of(certs, "ca.pem", "coordinator-coordinator.pem", "coordinator-coordinator.key")
    ray.init(ignore_reinit_error=True)
    group = placement_group([{"CPU": 1} for _ in nodes], strategy="SPREAD")
    ray.get(group.ready())
    coordinator = Coordinator.remote()
    address = ray.get(coordinator.start.remote(files, len(nodes)))

    def start(number: int) -> tuple[object, object]:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
        worker = Worker.options(scheduling_strategy=strategy, max_concurrency=2).remote()
        node = nodes[number]
        return worker, worker.train.remote(node, own[node], address, options.steps, options.pace)

    workers, running = {}, {}
    for number in range(len(nodes)):
        workers[number], run = start(number)
        running[run] = number
    if options.kill is not None:
        ray.wait(list(running), timeout=5.0)
        workers[options.kill].die.remote()
    results = {}
    while running:
        (ended,), _ = ray.wait(list(running), num_returns=1)
        number = running.pop(ended)
        try:
            results[nodes[number]] = ray.get(ended)
        except ray.exceptions.RayActorError:
            print(f"{nodes[number]} is lost, and replaced")
            workers[number], run = start(number)
            running[run] = number
    for node in nodes:
        print(f"{node}: {results[node]}")
    remove_placement_group(group)
    ray.shutdown()


if __name__ == "__main__":
    main()
