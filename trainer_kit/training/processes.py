"""A verb in a process that is no rank: start the ranks, and bring back what they made."""

from __future__ import annotations

import os
from typing import Any, Final

from trainer_kit.core.environment import Environment, pick_device
from trainer_kit.core.errors import LaunchError
from trainer_kit.core.move import move_to_device
from trainer_kit.state.runs import count_fit, hand_over
from trainer_kit.training.session import Session

__all__ = ["run_on_processes"]

_MAX_RESTARTS: Final = "TRAINER_KIT_MAX_RESTARTS"


def run_on_processes(trainer: Session, verb: str, model: Any, *arguments: Any) -> Any:
    """Run ``verb`` on the Trainer's processes.

    As the agent this never returns: the ranks run the script again and reach the verb themselves. With forked
    processes (notebooks) it returns rank 0's result, and the module, callbacks and metrics here are brought up to date.
    """
    if trainer.start == "agent":
        from trainer_kit.launch import run_agent

        run_agent(trainer.processes, extra_env=hand_over(trainer), max_restarts=_max_restarts())
    from trainer_kit.launch import run_forked

    def on_rank(rank: int) -> Any:
        trainer.start = None
        trainer.environment = Environment.detect()
        trainer.strategy.device = pick_device(trainer.strategy.device.type, rank)
        result = getattr(trainer, verb)(model, *arguments)
        if rank != 0:
            return None
        module = trainer.module
        return {
            "result": result,
            "weights": move_to_device(dict(module.state_dict()), "cpu"),  # sync point: at the end
            "progress": trainer.progress.state_dict(),
            "metrics": (trainer.metrics.callback, trainer.metrics.logged, trainer.metrics.progress_bar),
            "callbacks": [dict(callback.state_dict()) for callback in trainer.callbacks],
        }

    made = run_forked(on_rank, trainer.processes)
    if verb == "fit":
        count_fit()
    module = trainer.module if model is None else model
    module.load_state_dict(made["weights"])
    trainer.module = module
    trainer.progress.load_state_dict(made["progress"])
    trainer.metrics.forget()  # as a verb does here: neither the bar nor the monitors of a test see anything of training
    for here, there in zip(
        (trainer.metrics.callback, trainer.metrics.logged, trainer.metrics.progress_bar), made["metrics"], strict=True
    ):
        here.update(there)
    for callback, state in zip(trainer.callbacks, made["callbacks"], strict=True):
        if state:
            callback.load_state_dict(state)
    return made["result"]


def _max_restarts() -> int:
    """How often a run whose ranks fail is started again, for an agent that no command line asks."""
    value = os.environ.get(_MAX_RESTARTS, "0")
    if not value.isdigit():
        raise LaunchError(f"{_MAX_RESTARTS} is not a whole number", found=f"{_MAX_RESTARTS}={value}")
    return int(value)
