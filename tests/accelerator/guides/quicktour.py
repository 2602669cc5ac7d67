"""Train and evaluate, as the first pages teach it."""

import json

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit import Accelerator, set_seed

set_seed(0)
accelerator = Accelerator(cpu=True)
device = accelerator.device
features = torch.randn(45, 6)
labels = (features.sum(1) > 0).long()
training_dataloader = DataLoader(
    TensorDataset(features, labels), batch_size=8 // accelerator.num_processes
)
validation_dataloader = DataLoader(TensorDataset(features, labels), batch_size=4)
model = torch.nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
loss_function = torch.nn.CrossEntropyLoss()

model, optimizer, training_dataloader, scheduler = accelerator.prepare(
    model, optimizer, training_dataloader, scheduler
)
validation_dataloader = accelerator.prepare(validation_dataloader)

for _ in range(2):
    model.train()
    for inputs, targets in training_dataloader:
        optimizer.zero_grad()
        outputs = model(inputs.to(device))
        loss = loss_function(outputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()

model.eval()
right, seen = 0, 0
for inputs, targets in validation_dataloader:
    with torch.no_grad():
        predictions = model(inputs).argmax(dim=-1)
    all_predictions, all_targets = accelerator.gather_for_metrics(
        (predictions, targets)
    )
    right += (all_predictions == all_targets).sum().item()
    seen += len(all_targets)

accelerator.wait_for_everyone()
unwrapped = accelerator.unwrap_model(model)
accelerator.print(
    json.dumps(
        {
            "weights": unwrapped.weight.flatten().tolist(),
            "right": right,
            "seen": seen,
            "rate": scheduler.get_last_lr()[0],
        }
    )
)
accelerator.end_training()
