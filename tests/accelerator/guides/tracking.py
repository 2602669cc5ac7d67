"""Trackers by name, and one of the user's own."""

import json
from typing import Optional

import torch
from torch.utils.data import DataLoader, TensorDataset

from trainer_kit import (
    Accelerator,
    GeneralTracker,
    LoggerType,
    on_main_process,
    set_seed,
)


class MyCustomTracker(GeneralTracker):
    name = "mine"
    requires_logging_directory = False

    @on_main_process
    def __init__(self, run_name: str):
        self.run_name = run_name
        self.run = open(f"{run_name}.jsonl", "w")  # noqa: SIM115

    @property
    def tracker(self):
        return self.run

    @on_main_process
    def store_init_configuration(self, values: dict):
        self.run.write(json.dumps({"config": values}) + "\n")

    @on_main_process
    def log(self, values: dict, step: Optional[int] = None):  # noqa: UP045
        self.run.write(
            json.dumps(
                {"step": step, **{name: float(value) for name, value in values.items()}}
            )
            + "\n"
        )

    @on_main_process
    def finish(self):
        self.run.close()


set_seed(0)
tracker = MyCustomTracker("some_run_name")
accelerator = Accelerator(
    cpu=True, log_with=[tracker, LoggerType.TENSORBOARD], project_dir="."
)
config = {
    "num_iterations": 2,
    "learning_rate": 1e-2,
    "loss_function": str(torch.nn.MSELoss()),
}
accelerator.init_trackers("example_project", config=config)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=config["learning_rate"])
data = DataLoader(TensorDataset(torch.randn(16, 3), torch.randn(16, 1)), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for iteration in range(config["num_iterations"]):
    for step, (inputs, targets) in enumerate(data):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        accelerator.log({"training_loss": loss}, step=iteration * len(data) + step)
writer = accelerator.get_tracker("tensorboard", unwrap=True)
if accelerator.is_main_process:
    writer.add_text("note", "through the writer")
mine = accelerator.get_tracker("mine")
accelerator.end_training()
accelerator.print(
    json.dumps({"steps": config["num_iterations"] * len(data), "mine": mine.name})
)
