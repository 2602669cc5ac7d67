"""Local SGD: weights are averaged every few steps."""

import json

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit import Accelerator, LocalSGD, set_seed

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
data = TensorDataset(torch.randn(64, 3), torch.randn(64, 1))
dataloader = DataLoader(data, batch_size=4)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
model, optimizer, dataloader, scheduler = accelerator.prepare(
    model, optimizer, dataloader, scheduler
)
with LocalSGD(
    accelerator=accelerator, model=model, local_sgd_steps=2, enabled=True
) as local_sgd:
    for inputs, targets in dataloader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            local_sgd.step()
mine = accelerator.unwrap_model(model).weight.detach()
everyone = accelerator.gather(mine)
accelerator.print(
    json.dumps(
        {
            "weights": mine.flatten().tolist(),
            "spread": (everyone - mine).abs().max().item(),
        }
    )
)
accelerator.end_training()
