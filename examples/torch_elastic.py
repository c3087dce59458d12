"""An elastic torch loop: ranks come, go and are killed while it trains, and the bits are those of one process.

    quicoll run -n 4 --seed 7 examples/torch_elastic.py --steps 300 --pace 0.1 --checkpoints /tmp/elastic
    quicoll scale 2     # in another terminal; or kill -9 PID, for any of them

AdamW's state is divided between the ranks, with a copy of each part on another one. Whoever is killed is started again
and handed what it lacks; who goes by order hands over what it has. Start it a second time, on any number of ranks, and
it goes on from the checkpoint. The digest at the end is the same every time: it depends on the steps alone.
"""

import argparse
import os
import time

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import quicoll.blocking
import quicoll.torch
from quicoll.train import CheckpointPolicy, Divide


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds of pretended work in a step")
    parser.add_argument("--checkpoints")
    options = parser.parse_args()

    torch.manual_seed(1)
    torch.set_num_threads(1)
    x = torch.randn(512, 16)
    dataset = TensorDataset(x, (x @ torch.randn(16, 4)).argmax(1))
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    policy = CheckpointPolicy(options.checkpoints, every=20) if options.checkpoints else None
    with quicoll.blocking.join() as job:
        print(f"process {os.getpid()} joins as {job.node}", flush=True)
        training = quicoll.torch.Training(
            job, model, optimizer, dataset, batch_size=64, shards=8, divide=Divide(), checkpoints=policy
        )
        ranks = 0
        for step in training.steps(options.steps):
            with step:
                for x, y in step.shards:
                    step.backward(functional.cross_entropy(model(x), y))
                time.sleep(options.pace)
                step.reduce()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step.committed and (job.world_size != ranks or step.number % 20 == 0):
                ranks = job.world_size
                print(f"step {step.number} on {ranks} ranks: loss {step.loss:.4f}", flush=True)
        print(f"step {job.committed_step}, digest {training.digest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
