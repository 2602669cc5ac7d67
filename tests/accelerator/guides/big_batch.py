"""The largest batch that memory holds, the rest by accumulation."""

import json

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit import Accelerator, find_executable_batch_size, set_seed

accelerator = Accelerator(cpu=True)
observed_batch_size = 16 // accelerator.num_processes
data = TensorDataset(
    torch.randn(64, 3, generator=torch.Generator().manual_seed(1)), torch.ones(64, 1)
)
tried = []


@find_executable_batch_size(starting_batch_size=observed_batch_size)
def inner_training_loop(batch_size):
    global accelerator
    tried.append(batch_size)
    accelerator.gradient_accumulation_steps = observed_batch_size // batch_size
    accelerator.free_memory()
    set_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataloader = DataLoader(data, batch_size=batch_size)
    model, optimizer, dataloader = accelerator.prepare(model, optimizer, dataloader)
    for inputs, targets in dataloader:
        with accelerator.accumulate(model):
            if len(inputs) > 4:
                raise RuntimeError("CUDA out of memory.")
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.unwrap_model(model).weight.flatten().tolist()


weights = inner_training_loop()
accelerator.print(
    json.dumps(
        {
            "weights": weights,
            "tried": tried,
            "steps": accelerator.gradient_accumulation_steps,
        }
    )
)
accelerator.end_training()
