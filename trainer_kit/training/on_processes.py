"""Runs an entry point on processes that this process starts: with the launcher's agent, or forked in a notebook."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from trainer_kit.core.environment import Environment, pick_device
from trainer_kit.core.errors import LaunchError
from trainer_kit.core.state_names import uncompiled
from trainer_kit.core.tensors import move_to_device
from trainer_kit.state.collect import State
from trainer_kit.state.runs import count_fit
from trainer_kit.training.session import Session

__all__ = ["on_processes", "run_on_processes"]

# What a call returns; of forked ranks, rank 0 sends it through a pipe.
_Result: TypeAlias = Any

_MAX_RESTARTS: Final = "TRAINER_KIT_MAX_RESTARTS"


def on_processes(trainer: Session, call: Callable[[int], _Result]) -> _Result:
    """Call ``call(rank)`` on each rank that this process starts, or in this process if it is a rank.

    Returns rank 0's result. In the agent this never returns: its ranks run the script and reach the same call.
    """
    # This process is a rank.
    if trainer.start is None:
        return call(trainer.global_rank)
    if trainer.start == "agent":
        from trainer_kit.launch import run_agent

        run_agent(
            trainer.processes,
            extra_env=trainer.files.hand_over(),
            max_restarts=_max_restarts(),
        )
    from trainer_kit.launch import run_forked

    def on_rank(rank: int) -> _Result:
        device = pick_device(trainer.strategy.device.type, rank)
        trainer.become_rank(Environment.detect(), device, trainer.processes)
        return call(rank)

    return run_forked(on_rank, trainer.processes)


def run_on_processes(trainer: Session, stage: str, model: Any, *arguments: Any) -> Any:
    """Run an entry point with `on_processes`.

    After forked processes (in notebooks), copy rank 0's weights, counts, metrics and callback state to this process.
    """

    def on_rank(rank: int) -> State | None:
        result = getattr(trainer, stage)(model, *arguments)
        if rank != 0:
            return None
        return {"result": result, **_collect_result(trainer)}

    # It counts as interrupted until the ranks have sent their result: a rank that dies sends none.
    trainer.running.begin_elsewhere(stage)
    state = on_processes(trainer, on_rank)
    if stage == "fit":
        count_fit()
        trainer.end_continuation()
    module = trainer.module
    if model is not None:
        module = uncompiled(model)
    module.load_state_dict(state["weights"])
    trainer.running.take_result(state["restored_from"])
    trainer.show_module(module)
    trainer.progress.load_state_dict(state["progress"])
    trainer.metrics.forget()  # the same as in `EntryPoint`
    for values, values_of_rank in zip(
        _metric_values(trainer), state["metrics"], strict=True
    ):
        values.update(values_of_rank)
    # The ranks were forked from this process, so they have its callbacks, in its order.
    for callback, callback_state in zip(
        trainer.callbacks, state["callbacks"], strict=True
    ):
        if callback_state:
            callback.load_state_dict(callback_state)
    return state["result"]


def _collect_result(trainer: Session) -> State:
    """What an entry point has changed, to be sent to the process that started this rank."""
    # A pickled tensor keeps its device, which belongs to this rank. A sync point, at the end.
    weights = move_to_device(dict(trainer.module.state_dict()), "cpu")
    return {
        "weights": weights,
        "progress": trainer.progress.state_dict(),
        "restored_from": trainer.ckpt_path,
        "metrics": _metric_values(trainer),
        "callbacks": [dict(callback.state_dict()) for callback in trainer.callbacks],
    }


def _metric_values(trainer: Session) -> tuple[dict[str, Any], ...]:
    metrics = trainer.metrics
    return metrics.callback, metrics.logged, metrics.progress_bar


def _max_restarts() -> int:
    """How often an agent that was not started by the command line restarts a run after a rank failed."""
    value = os.environ.get(_MAX_RESTARTS, "0")
    if not value.isdigit():
        raise LaunchError(
            f"{_MAX_RESTARTS} is not an integer", found=f"{_MAX_RESTARTS}={value}"
        )
    return int(value)
