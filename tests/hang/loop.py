"""A loop of an Accelerator in which the process of the third argument does what the first says, at step 5."""

import os
import signal
import sys
import time

import torch
from torch import nn

import trainer_kit as tk

FAULT, LIMIT = sys.argv[1], float(sys.argv[2])


def stop_later(graph, inputs):
    time.sleep(1)  # until it has been seen in its compilation
    print("fault at", time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
    return graph


accelerator = tk.Accelerator(cpu=True, hang_timeout=LIMIT, project_dir="project")
model = nn.Linear(4, 1)
model, optimizer = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1)
)
for step in range(20):
    if step == 5 and accelerator.process_index == int(sys.argv[3]):
        if FAULT != "compiling":
            print("fault at", time.time(), flush=True)
        if FAULT == "sleep":
            time.sleep(300)
        elif FAULT == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif FAULT == "compiling":
            torch.compile(torch.sin, backend=stop_later)(torch.ones(8))
        elif FAULT == "other":
            accelerator.gather(torch.ones(3))
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(8, 4)).mean())
    optimizer.step()
