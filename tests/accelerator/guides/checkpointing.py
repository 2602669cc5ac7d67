"""Save in the middle of an epoch, and go on from there in the same process and in another one."""

import json
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit import Accelerator, ProjectConfiguration, set_seed

resume = sys.argv[1] == "resume"
set_seed(42)
accelerator = Accelerator(
    cpu=True,
    project_config=ProjectConfiguration(
        project_dir="project", automatic_checkpoint_naming=True, total_limit=2
    ),
)
data = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
train_dataloader = DataLoader(data, batch_size=8 // accelerator.num_processes)
my_model = torch.nn.Sequential(
    torch.nn.Linear(4, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1)
)
my_optimizer = torch.optim.AdamW(my_model.parameters(), lr=0.01)
my_scheduler = torch.optim.lr_scheduler.StepLR(my_optimizer, step_size=1, gamma=0.9)
my_model, my_optimizer, train_dataloader = accelerator.prepare(
    my_model, my_optimizer, train_dataloader
)
accelerator.register_for_checkpointing(my_scheduler)
first_epoch, skip = 0, 0
if resume:
    accelerator.load_state("project/checkpoints/checkpoint_1")
    first_epoch, skip = 1, 3
else:
    accelerator.save_state()
for epoch in range(first_epoch, 3):
    active = train_dataloader
    if resume and epoch == first_epoch:
        active = accelerator.skip_first_batches(train_dataloader, skip)
    for number, (inputs, targets) in enumerate(active):
        my_optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(my_model(inputs), targets)
        accelerator.backward(loss)
        my_optimizer.step()
        if not resume and epoch == 1 and number == 2:
            accelerator.save_state()
    my_scheduler.step()
weights = [
    p.flatten().tolist() for p in accelerator.unwrap_model(my_model).parameters()
]
accelerator.save_model(my_model, "saved")
accelerator.print(json.dumps({"weights": weights, "rate": my_scheduler.get_last_lr()}))
accelerator.end_training()
