"""Accumulation over samples of different lengths: windows are loaded ahead, and divided by all of their tokens."""

import contextlib
import copy
import json
import math

import torch
from torch.utils.data import DataLoader, Dataset

from trainer_kit import Accelerator, get_logger, set_seed

set_seed(0)
logger = get_logger(__name__)
gradient_accumulation_steps, per_device_batch_size = 2, 4
accelerator = Accelerator(
    cpu=True, gradient_accumulation_steps=gradient_accumulation_steps
)


class Sequences(Dataset):
    def __init__(self, count):
        self.count = count

    def __getitem__(self, index):
        ids = torch.arange(1, index + 2, dtype=torch.float32)
        return {"input_ids": ids, "labels": torch.remainder(ids, 2)}

    def __len__(self):
        return self.count


def collate(features):
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([f["input_ids"] for f in features], batch_first=True, padding_value=-100)
    labels = pad([f["labels"] for f in features], batch_first=True, padding_value=-100)
    return {"input_ids": ids[..., None], "labels": labels[..., None]}


dataset = Sequences(
    per_device_batch_size * gradient_accumulation_steps * accelerator.num_processes
)
dataloader = DataLoader(dataset, batch_size=per_device_batch_size, collate_fn=collate)
model = torch.nn.Linear(1, 2, bias=False)
clone = copy.deepcopy(model)
criterion = torch.nn.CrossEntropyLoss(reduction="sum")
optimizer = torch.optim.SGD(model.parameters(), lr=0.08)
logger.warning("begins")
model, optimizer = accelerator.prepare(model, optimizer)
dataloader = accelerator.prepare_data_loader(dataloader, device_placement=True)
iterator = iter(dataloader)
remainder = len(dataloader) % gradient_accumulation_steps or gradient_accumulation_steps
updates = math.ceil(len(dataloader) / gradient_accumulation_steps)
for update in range(updates):
    count = gradient_accumulation_steps if update != updates - 1 else remainder
    batches = [next(iterator) for _ in range(count)]
    tokens = sum((batch["labels"].ne(-100)).sum() for batch in batches)
    tokens = accelerator.gather(tokens).sum().item()
    for i, batch in enumerate(batches):
        quiet = i < len(batches) - 1 and accelerator.num_processes > 1
        with model.no_sync() if quiet else contextlib.nullcontext():
            outputs = model(batch["input_ids"])
            loss = criterion(
                outputs.view(-1, 2), batch["labels"].view(-1).to(torch.int64)
            )
            loss = (
                loss * gradient_accumulation_steps * accelerator.num_processes
            ) / tokens
            accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()

whole = next(iter(DataLoader(dataset, batch_size=len(dataset), collate_fn=collate)))
clone_optimizer = torch.optim.SGD(clone.parameters(), lr=0.08)
torch.nn.CrossEntropyLoss()(
    clone(whole["input_ids"]).view(-1, 2), whole["labels"].view(-1).long()
).backward()
clone_optimizer.step()
found = accelerator.unwrap_model(model).weight.flatten().tolist()
accelerator.print(
    json.dumps(
        {"with": found, "without": clone.weight.flatten().tolist(), "tokens": tokens}
    )
)
accelerator.end_training()
