"""Who does what: turns, triggers, one process only, parts of a list."""

import json
import os

import torch

from trainer_kit import Accelerator, DistributedType, PartialState, get_logger

accelerator = Accelerator(cpu=True)
logger = get_logger(__name__)
said = []
state = PartialState(cpu=True)
with accelerator.main_process_first():
    if accelerator.is_main_process:
        open("prepared", "w").close()
    said.append(os.path.exists("prepared"))


@accelerator.on_main_process
def only_main():
    return "main"


@accelerator.on_last_process
def only_last():
    return "last"


@accelerator.on_process(process_index=0)
def only_first():
    return "first"


said += [only_main(), only_first()]
if accelerator.is_last_process:
    accelerator.set_trigger()
for _ in range(2):
    said.append(accelerator.check_trigger())
with state.split_between_processes(["a", "b", "c"]) as part:
    said.append(len(part))
logger.info("not shown", main_process_only=False)
assert accelerator.state.deepspeed_plugin is None
assert accelerator.state.num_processes == accelerator.num_processes
kind = (
    DistributedType.NO if accelerator.num_processes == 1 else DistributedType.MULTI_CPU
)
assert accelerator.distributed_type == kind == str(kind.value)
reduced = accelerator.reduce(torch.tensor([1.0, 2.0]), reduction="sum").tolist()
accelerator.wait_for_everyone()
accelerator.print(
    json.dumps({"said": said, "reduced": reduced, "only_last": only_last()})
)
accelerator.end_training()
