"""For programs written with torch: an ordinary training loop whose steps are atomic, its bits those of any world size.

    import quicoll.blocking, quicoll.torch

    with quicoll.blocking.join() as job:
        training = quicoll.torch.Training(job, model, optimizer, dataset, batch_size=64, shards=8)
        for step in training.epochs(3):
            with step:
                for x, y in step.shards:
                    step.backward(F.cross_entropy(model(x), y))
                step.reduce()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

`AsyncTraining` is the same for loops in asyncio.
"""

from __future__ import annotations

from quicoll.torch import functional, parallel
from quicoll.torch.ddp import CanonicalHook
from quicoll.torch.experts import Experts
from quicoll.torch.fsdp import carry_shards
from quicoll.torch.mesh import device_mesh
from quicoll.torch.model_state import ModelState, state_of
from quicoll.torch.recomputation import recomputed
from quicoll.torch.training import AsyncTraining, AsyncTrainingStep, Training, TrainingStep

__all__ = [
    "AsyncTraining",
    "AsyncTrainingStep",
    "CanonicalHook",
    "Experts",
    "ModelState",
    "Training",
    "TrainingStep",
    "carry_shards",
    "device_mesh",
    "functional",
    "parallel",
    "recomputed",
    "state_of",
]
