"""PyTorch Lightning over quicoll: its DDP strategy, with quicoll as the backend.

    pip install lightning
    torchrun --nproc-per-node=2 examples/lightning_ddp.py

The digest at the end, of all parameters, is the same on every rank and in every run with equally many ranks.
"""

import hashlib

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    """Says in which of four classes a point is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    lightning.seed_everything(1, verbose=False)
    torch.set_num_threads(1)
    x = torch.randn(512, 16)
    dataset = TensorDataset(x, (x @ torch.randn(16, 4)).argmax(1))
    model = Classifier()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="quicoll"),
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(dataset, batch_size=32))
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.parameters())).hexdigest()
    print(
        f"rank {dist.get_rank()} of {dist.get_world_size()} over {dist.get_backend()}: "
        f"loss {trainer.callback_metrics['loss']:.4f}, digest {digest[:16]}",
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
