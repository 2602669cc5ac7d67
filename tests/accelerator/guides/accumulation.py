"""Accumulation: one window over all data equals one batch."""

import copy
import json

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit import Accelerator, set_seed

set_seed(0)
x = torch.arange(1.0, 9.0)
y = 2 * x
gradient_accumulation_steps = 4
accelerator = Accelerator(
    cpu=True, gradient_accumulation_steps=gradient_accumulation_steps
)
per_device_batch_size = (
    len(x) // gradient_accumulation_steps // accelerator.num_processes
)
dataloader = DataLoader(TensorDataset(x, y), batch_size=per_device_batch_size)


class Slope(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros((1, 1)))

    def forward(self, inputs):
        return inputs @ self.weight


model = Slope()
clone = copy.deepcopy(model)
criterion = torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
clone_optimizer = torch.optim.SGD(clone.parameters(), lr=0.02)
syncs = []
for inputs, labels in dataloader:
    with accelerator.accumulate(model):
        loss = criterion(model(inputs.view(-1, 1)), labels.view(-1, 1))
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1000.0)
        optimizer.step()
        optimizer.zero_grad()
        syncs.append(accelerator.sync_gradients)
criterion(x.view(-1, 1) @ clone.weight, y.view(-1, 1)).backward()
clone_optimizer.step()
accelerator.print(
    json.dumps(
        {
            "with": accelerator.unwrap_model(model).weight.item(),
            "without": clone.weight.item(),
            "syncs": syncs,
        }
    )
)
accelerator.end_training()
