"""Ranks as Ray's actors in a placement group: `python examples/ray_train.py --ranks 3`, with Ray and quicoll installed.

It starts a local Ray, or takes the cluster that RAY_ADDRESS names. One actor is the coordinator, each other one a rank.
An actor that is lost is started again by Ray, under the same name: it joins, is handed the state of the others, and
goes on with them. `--kill 1` shows that. The training is that of train_loop.py, and the digest at the end is the same
for any number of ranks and whatever was lost meanwhile.

No key leaves the process that it was made in, so Ray sees none. A rank asks the coordinator's actor for a certificate;
whoever may call actors of this cluster can ask as well, and take part.
"""

import argparse
import asyncio
import contextlib
from functools import partial
from pathlib import Path

import numpy as np
import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

import quicoll
from quicoll import checkpoint
from quicoll.membership.serving import serve
from quicoll.rendezvous.applicant import Applicant, certificate_pem, certify_node
from quicoll.rendezvous.scratch import scratch_directory
from quicoll_transport.security.authority import Authority, create_authority, issue

JOB = "ray"
SHARDS = 8
TRUE_WEIGHTS = np.array([2.0, -1.0, 0.5], np.float32)
AGAIN = {"max_restarts": -1, "max_task_retries": -1}
"""Of an actor: Ray starts it again whenever it dies, and calls again what was being called."""


@ray.remote(num_cpus=0, **AGAIN)
class Coordinator:
    """The job's coordinator, and who signs certificates. All that it needs after a restart lies in its directory."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.directory = directory
        self.ranks = ranks
        self.listening = asyncio.Event()
        self.awaited: dict[int, asyncio.Event] = {}

    async def serve(self) -> None:
        """Serve, until the actor is killed. The ranks know one address, so a restart takes the same."""
        address = self.directory / "address"

        def observe(event: quicoll.Event) -> None:
            if event.kind == "listening":
                address.write_text(event.fields["address"])
                self.listening.set()
            elif event.kind == "step_committed" and event.fields["step"] in self.awaited:
                self.awaited[event.fields["step"]].set()

        await serve(
            listen=address.read_text() if address.exists() else f"{ray.util.get_node_ip_address()}:0",
            job=JOB,
            certs=self.directory / "certs",
            journal=self.directory / "journal.sqlite",
            world_size=self.ranks,
            observer=observe,
        )

    async def admit(self, node: str, public_key: str) -> dict[str, str]:
        """Return a rank's certificate, the authority's, and where the coordinator listens."""
        await self.listening.wait()
        authority = Authority.load(self.directory / "certs")
        return {
            "certificate": certify_node(authority, public_key=public_key, node=node),
            "authority": certificate_pem(authority.certificate),
            "coordinator": (self.directory / "address").read_text(),
        }

    async def committed(self, step: int) -> None:
        """Return when this step is committed."""
        await self.awaited.setdefault(step, asyncio.Event()).wait()


@ray.remote(**AGAIN)
class Rank:
    """One rank."""

    def train(self, node: str, coordinator: ray.actor.ActorHandle, steps: int, pace: float) -> str | None:
        """Join and train. Returns the digest of the weights, or None where the others had ended the job before."""
        applicant = Applicant(job=JOB, node=node)
        given = ray.get(coordinator.admit.remote(node, applicant.public_key))
        with scratch_directory() as certs:
            applicant.accept(certs, authority=given["authority"], certificate=given["certificate"])
            joining = quicoll.join(job=JOB, node=node, coordinator=given["coordinator"], certs=certs)
            try:
                return asyncio.run(loop(joining, steps, pace))
            except quicoll.JobDone:
                return None


async def loop(joining, steps: int, pace: float) -> str:
    weights = np.zeros(3, np.float32)
    async with joining as job:

        def load(state: dict[str, np.ndarray]) -> None:
            weights[:] = state["weights"]

        job.register_state(lambda: {"weights": weights}, load)
        print(f"{job.node} is rank {job.rank} of {job.world_size}, at step {job.committed_step}", flush=True)
        while job.committed_step < steps:
            try:
                async with job.step() as step:
                    await asyncio.sleep(pace)
                    shards = job.group.shards(SHARDS)
                    leaves = [gradient(weights, shard, step.number) for shard in shards]
                    average = await job.group.all_reduce(shards.leaves(leaves, like=weights), op="avg")
                    step.on_commit(partial(np.subtract, weights, 0.1 * average, out=weights))
            except quicoll.StepAborted as aborted:
                print(f"{job.node}: {aborted}", flush=True)
        return checkpoint.digest({"weights": weights})


def gradient(weights: np.ndarray, shard: int, step: int) -> np.ndarray:
    """Of the squared error on the shard's 64 points, drawn from (shard, step) alone: any rank can compute any shard."""
    x = np.random.default_rng([shard, step]).standard_normal((64, 3), dtype=np.float32)
    return x.T @ (x @ weights - x @ TRUE_WEIGHTS) / np.float32(64)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cpus", type=float, default=1.0, help="of each rank; may be a fraction")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds of pretended work in a step")
    parser.add_argument("--kill", help="a rank's number, or 'coordinator': its process is killed while all train")
    options = parser.parse_args()

    ray.init()
    # Each rank on a node of its own as far as there are so many; STRICT_SPREAD would wait for them instead.
    group = placement_group([{"CPU": options.cpus}] * options.ranks, strategy="SPREAD")
    ray.get(group.ready())
    with scratch_directory() as directory:
        certs = directory / "certs"
        create_authority(certs, job=JOB)
        issue(certs, role="coordinator", node="coordinator")
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        coordinator = Coordinator.options(scheduling_strategy=here).remote(directory, options.ranks)
        serving = coordinator.serve.remote()
        ranks, training = [], {}
        for number in range(options.ranks):
            bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            ranks.append(Rank.options(num_cpus=options.cpus, scheduling_strategy=bundle).remote())
            node = f"worker-{number}"
            training[ranks[number].train.remote(node, coordinator, options.steps, options.pace)] = node
        if options.kill is not None:
            ray.wait([serving, *training, coordinator.committed.remote(options.steps // 2)])
            ray.kill(coordinator if options.kill == "coordinator" else ranks[int(options.kill)], no_restart=False)
        while training:
            (ended,), _ = ray.wait([serving, *training])
            digest = ray.get(ended)  # raises what ended it
            print(f"{training.pop(ended)}: digest {digest[:16] if digest else 'not at hand: it came after the end'}")
        ray.cancel(serving)  # it closes its journal
        with contextlib.suppress(ray.exceptions.TaskCancelledError):
            ray.get(serving)
    remove_placement_group(group)
    ray.shutdown()


if __name__ == "__main__":
    main()
