"""The loop of examples/torch_plain.py with atomic steps: `quicoll run -n 3 --seed 7 examples/torch_loop.py`.

Kill a worker while it runs (`kill -9 PID`), or take another number of ranks: the digest at the end is the same.
"""

import os

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import quicoll.blocking
import quicoll.torch

torch.manual_seed(1)
torch.set_num_threads(1)
x = torch.randn(512, 16)
dataset = TensorDataset(x, (x @ torch.randn(16, 4)).argmax(1))

model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
with quicoll.blocking.join() as job:
    print(f"process {os.getpid()} is rank {job.rank} of {job.world_size}", flush=True)
    training = quicoll.torch.Training(job, model, optimizer, dataset, batch_size=64, shards=8, scheduler=scheduler)
    for step in training.epochs(3):
        with step:
            for x, y in step.shards:
                loss = functional.cross_entropy(model(x), y)
                step.backward(loss)
            step.reduce()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step.number % 8 == 0:
            print(f"loss {step.loss:.4f}", flush=True)
    print(f"digest {training.digest()[:16]}")
