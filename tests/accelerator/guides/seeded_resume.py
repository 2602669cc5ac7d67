"""The calls of Accelerate's by_feature/checkpointing.py in their order: Accelerator, seed, loaders, prepare, resume."""

import json
import sys

import torch
from torch.utils.data import DataLoader, Dataset

from trainer_kit import Accelerator, set_seed

seed_with, workers, resume_from = (
    sys.argv[1],
    int(sys.argv[2]),
    sys.argv[3] if len(sys.argv) > 3 else None,
)
torch.seed()  # a process of its own: tests fork theirs from one that has drawn its seed already


class Noisy(Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        return index, torch.full((4,), float(index)) + torch.randn(4), torch.randn(1)


accelerator = Accelerator(cpu=True)
if seed_with == "set_seed":
    set_seed(42)
elif seed_with == "torch":
    torch.manual_seed(42)
train_dataloader = DataLoader(
    Noisy(),
    shuffle=True,
    batch_size=4 // accelerator.num_processes,
    num_workers=workers,
)
eval_dataloader = DataLoader(Noisy(), shuffle=True, batch_size=8)
model = torch.nn.Sequential(
    torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
model, optimizer, train_dataloader, eval_dataloader, scheduler = accelerator.prepare(
    model, optimizer, train_dataloader, eval_dataloader, scheduler
)
starting_epoch, resume_step, overall_step = 0, None, 0
if resume_from is not None:
    accelerator.load_state(resume_from)
    if resume_from.startswith("epoch_"):
        starting_epoch = int(resume_from.replace("epoch_", "")) + 1
    else:
        resume_step = int(resume_from.replace("step_", ""))
        starting_epoch = resume_step // len(train_dataloader)
        resume_step -= starting_epoch * len(train_dataloader)
seen = {}
for epoch in range(starting_epoch, 3):
    model.train()
    active_dataloader = train_dataloader
    if epoch == starting_epoch and resume_step is not None:
        active_dataloader = accelerator.skip_first_batches(
            train_dataloader, resume_step
        )
        overall_step += resume_step
    read = seen[epoch] = []
    for index, x, y in active_dataloader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        overall_step += 1
        read.append(accelerator.gather_for_metrics(index).tolist())
        if (
            resume_from is None
            and epoch == 1
            and overall_step % len(train_dataloader) == 2
        ):
            accelerator.save_state(f"step_{overall_step}")
    model.eval()
    seen[f"eval {epoch}"] = [
        accelerator.gather_for_metrics(index).tolist()
        for index, x, y in eval_dataloader
    ]
    if resume_from is None:
        accelerator.save_state(f"epoch_{epoch}")
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
print(json.dumps({"seen": seen, "weights": weights.tolist()}))
