"""An ordinary torch program in one process; examples/torch_loop.py is the same on any number of ranks: compare them."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
torch.set_num_threads(1)
x = torch.randn(512, 16)
dataset = TensorDataset(x, (x @ torch.randn(16, 4)).argmax(1))

model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
loader = DataLoader(dataset, batch_size=64, shuffle=True)
for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    print(f"loss after epoch {epoch}: {loss:.4f}")
