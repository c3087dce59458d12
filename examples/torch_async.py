"""Data-parallel training of a torch module in an asyncio program: other tasks go on while it waits for other ranks.

    quicoll run -n 3 --seed 7 examples/torch_async.py

Beside the loop a task of the program's own answers on a port of this machine how far the training is. The digest at
the end is the same on any number of ranks, and where one is killed (`kill -9 PID`) meanwhile.
"""

import asyncio
import os

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import quicoll
import quicoll.torch


class Progress:
    """How far the training is, for whoever asks: one line, and the connection ends."""

    def __init__(self) -> None:
        self.line = "step 0"

    async def answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"{self.line}\n".encode())
        await writer.drain()
        writer.close()


async def train(job: quicoll.Job, progress: Progress) -> str:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    x = torch.randn(512, 16)
    dataset = TensorDataset(x, (x @ torch.randn(16, 4)).argmax(1))
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = quicoll.torch.AsyncTraining(job, model, optimizer, dataset, batch_size=64, shards=8)
    async for step in training.epochs(3):
        async with step:
            for x, y in step.shards:
                step.backward(functional.cross_entropy(model(x), y))
                await asyncio.sleep(0)  # a pass takes the loop's thread: let the others have their turn
        if step.committed:
            progress.line = f"step {step.number} on {job.world_size} ranks: loss {step.loss:.4f}"
            if step.number % 8 == 0:
                print(progress.line, flush=True)
    return training.digest()


async def main() -> None:
    progress = Progress()
    async with quicoll.join() as job, await asyncio.start_server(progress.answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        print(f"process {os.getpid()} is rank {job.rank} of {job.world_size}, and answers on port {port}", flush=True)
        digest = await train(job, progress)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        print(f"asked, it says: {(await reader.readline()).decode().strip()}")
        writer.close()
        print(f"digest {digest[:16]}", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
