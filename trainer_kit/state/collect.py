"""Collects the whole state of a run into one dict for a checkpoint, and restores it, in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from torch import Tensor, nn

from trainer_kit.checkpoint.encoding import encode
from trainer_kit.core.collective_errors import fail_together, on_every_rank
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.display import holds_secret, mask_secrets
from trainer_kit.core.errors import CheckpointError, TrainerKitError
from trainer_kit.core.module import TrainModule
from trainer_kit.core.seed import restore_rng, rng_state
from trainer_kit.core.state_names import names_in, plain_state, state_name
from trainer_kit.state.data_changes import compare_data
from trainer_kit.state.optimizer_states import (
    add_groups,
    changed_flags,
    optimizer_state,
    owned_parameters,
    parameter_names,
    restore_flags,
    restore_optimizer,
    restore_scheduler,
    without_wrapper_names,
)
from trainer_kit.step.optimizers import Optimizers
from trainer_kit.step.run import Fit
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "collect",
    "finished",
    "fitting",
    "module_state",
    "own_buffers",
    "own_part",
    "plain_hparams",
    "ranks_differ",
    "restore",
    "without_own_buffers",
]


def module_state(
    module: TrainModule, weights: Mapping[str, Any], epoch: int, step: int
) -> dict[str, Any]:
    """Weights and hyperparameters: the part of the state that does not depend on a run."""
    return {
        "state_dict": dict(weights),
        "hyper_parameters": plain_hparams(module.hparams)[0],
        "epoch": epoch,
        "global_step": step,
    }


def plain_hparams(hparams: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The hyperparameters as a checkpoint holds them, and the names of those that it holds by a masked repr only.

    A large module is held by its repr: its weights are in the checkpoint already.
    """
    plain, refused = {}, []
    for name, value in hparams.items():
        if holds_secret(value, name) or not _can_be_held(value, name):
            refused.append(name)
            plain[name] = {"repr": repr(mask_secrets(value, name))}
        else:
            plain[name] = value
    return plain, refused


_LARGE_MODULE: Final = 1 << 20
"""Bytes of weights above which a module among the hyperparameters is held by its repr."""


def _can_be_held(value: Any, name: str) -> bool:
    if isinstance(value, nn.Module):
        size = sum(tensor.nbytes for tensor in (*value.parameters(), *value.buffers()))
        if size > _LARGE_MODULE:
            return False
    try:
        encode(value, {}, at=name, copy=False)
    except CheckpointError:
        return False
    return True


def collect(
    run: Fit,
    callbacks: list[Any],
    datamodule: DataModule | None,
    seed: int,
    weights_only: bool,
    hooks: bool = True,
    owes_validation: bool = False,
) -> dict[str, Any]:
    """Collect the state after the last completed step. Every rank must call it.

    Args:
        run: the fit.
        callbacks: whose ``state_dict`` is kept, by ``state_key``.
        datamodule: whose ``state_dict`` is kept, or None.
        seed: of the order of the data.
        weights_only: leave out everything but weights and hyperparameters.
        hooks: whether ``on_save_checkpoint`` is called.
        owes_validation: whether a validation that is due at this step has not run.
    """
    progress = run.progress
    weights = fail_together(
        run.strategy.world, lambda: run.strategy.module_state(run.module)
    )
    state = module_state(run.module, weights, progress.epoch, progress.step)
    if not weights_only:
        names = parameter_names(run.strategy, run.module)
        state["optimizer_states"] = [
            optimizer_state(run.strategy, o, names) for o in run.stepper.made.optimizers
        ]
        state.update(_of_this_rank(run, names))
        state["precision"] = run.precision.state_dict()
        state["progress"] = finished(run)
        state["trainable"] = changed_flags(run)
        state["inside_step"] = run.micro.started == progress.step
        state["owes_validation"] = not state["inside_step"] and owes_validation
        if run.stepper.waiting and not state["inside_step"]:
            schedulers = run.stepper.made.schedulers
            state["waiting_schedulers"] = [
                i for i, one in enumerate(schedulers) if one in run.stepper.waiting
            ]
        state["seed"] = seed
        if not run.schedule.may_stop(progress):
            state["stop"] = (
                run.requests.stop
            )  # the request waits for the minimum, in a resumed run too
        state.update(run.about())
        state["stride"] = run.windows.feed.stride
        state["data"] = run.windows.feed.facts
        buffers_here: list[dict[str, Tensor]] = []
        lent = {
            name: tensor for c in callbacks for name, tensor in c.lent_weights.items()
        }

        def collect_users() -> tuple[Any, ...]:
            buffers_here.append(own_buffers(run.strategy, run.module, lent))
            return _of_users(run, state, callbacks, datamodule)

        everyone = on_every_rank(run.strategy.world, collect_users)
        state["rng"], values, loaders = map(list, zip(*everyone, strict=True))
        state["data_ranks"] = [rank for rank, _ in loaders]
        # Once for each data rank, however many ranks read its batches: that number depends on the layout.
        state["loaders"] = _by_rank(loaders)
        state["metrics"] = _by_rank(
            [(rank, values[reporter][2]) for rank, reporter, _ in values]
        )
        buffers = run.strategy.world.gather_object(buffers_here[0])
        if buffers is not None and any(buffers):  # on rank 0, which writes them
            state["buffers"] = buffers
    if hooks:
        on_every_rank(
            run.strategy.world, partial(_call, run.bus.on_save_checkpoint, state)
        )
    return state


def _call(hooks: Iterable[Callable[..., Any]], state: Mapping[str, Any]) -> None:
    for hook in hooks:
        hook(state)


def _of_users(
    run: Fit, state: dict[str, Any], callbacks: list[Any], datamodule: DataModule | None
) -> tuple[Any, ...]:
    """Add the state of the user's objects, any of which may raise; returns what each rank contributes."""
    strategy = run.strategy
    state["lr_schedulers"] = [
        config.scheduler.state_dict() for config in run.stepper.made.schedulers
    ]
    state["callbacks"] = {
        c.state_key: dict(own) for c in callbacks if (own := c.state_dict())
    }
    state["datamodule"] = {} if datamodule is None else dict(datamodule.state_dict())
    if datamodule is not None:
        state["datamodule_hyper_parameters"] = plain_hparams(datamodule.hparams)[0]
    logged = (strategy.reports.rank, strategy.reporter, run.metrics.state_dict())
    loaders = (strategy.data.rank, _loader_state(run, state["progress"]))
    return rng_state(strategy.device), logged, loaders


def _of_this_rank(run: Fit, names: Mapping[int, str]) -> dict[str, Any]:
    """With an engine whose ranks have different weights, this rank's part, in addition to the shared part."""
    if not run.strategy.per_rank_state:
        return {}
    with run.strategy.own_state():
        weights = {
            k: v
            for k, v in run.strategy.module_state(run.module).items()
            if isinstance(v, Tensor)
        }
        optimizers = [
            optimizer_state(run.strategy, o, names) for o in run.stepper.made.optimizers
        ]
    return {
        own_part(run.strategy.world.rank): {
            "state_dict": weights,
            "optimizer_states": optimizers,
        }
    }


def own_part(rank: int | str) -> str:
    """The name of the part of a checkpoint that belongs to one rank; with ``""`` the prefix of all of them."""
    return f"replica-{rank}"


def _by_rank(numbered: list[tuple[int, Any]]) -> list[Any]:
    return [value for _, value in sorted(dict(numbered).items())]


def own_buffers(
    strategy: Strategy, module: nn.Module, lent: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The buffers of this rank that rank 0's ``state_dict`` does not have, on the CPU, to be sent.

    Args:
        strategy: under which the module is trained.
        module: whose buffers.
        lent: by name, live tensors that are currently swapped out of the module (for example for EMA).
    """
    if strategy.world.rank == 0 or not strategy.own_buffers:
        return {}
    kept = plain_state(module)
    buffers = (
        (state_name(name), buffer)
        for name, buffer in module.named_buffers(remove_duplicate=False)
    )
    own = {
        name: (lent or {}).get(name, buffer) for name, buffer in buffers if name in kept
    }
    return {
        name: buffer.detach().cpu() for name, buffer in own.items()
    }  # sync point: a checkpoint


def without_own_buffers(
    strategy: Strategy, module: nn.Module, weights: Mapping[str, Any]
) -> dict[str, Any]:
    """The weights that this rank may write where all ranks write together.

    A tensor that several ranks hold is written by any of them, so only the first data rank writes running statistics.
    """
    if not strategy.sharded or not strategy.own_buffers or strategy.data.rank == 0:
        return dict(weights)
    theirs = {
        state_name(name) for name, _ in module.named_buffers(remove_duplicate=False)
    }
    return {name: value for name, value in weights.items() if name not in theirs}


def finished(run: Fit) -> dict[str, int | float]:
    """Progress up to the last completed window: a resumed run repeats an unfinished window from its first batch."""
    progress, micro = run.progress, run.micro
    state = progress.state_dict()
    if micro.started == progress.step:
        done = progress.epoch_batch - micro.first
        state["epoch_batch"] -= done
        state["batch"] -= done
        state["samples"] -= sum(micro.sizes[:done])
        state["tokens"] -= micro.tokens if done == micro.count else 0
    return state


def restore(
    run: Fit,
    state: Mapping[str, Any],
    made: Optimizers,
    callbacks: list[Any],
    datamodule: DataModule | None,
    strict: bool,
    global_batch_size: int | None = None,
) -> None:
    """Restore everything at one point: after the module is wrapped and optimizers exist, before ``on_fit_start``.

    An error on one rank is raised on all: the others would wait in the next collective call.
    """
    world = run.strategy.world
    fail_together(world, partial(_call, run.bus.on_load_checkpoint, state))
    differs = ranks_differ(run.strategy, state)
    if differs is None:  # otherwise every rank continues from the shared part
        state = {**state, **state.get(own_part(world.rank), {})}
    fail_together(world, lambda: _restore_weights(run, state, strict))
    if "optimizer_states" not in state:
        return  # weights only
    state = {
        **state,
        "optimizer_states": [
            without_wrapper_names(saved) for saved in state["optimizer_states"]
        ],
    }
    _restore_training(run, state, made)

    def restore_loaders() -> None:
        with fitting("loaders"):
            _restore_loaders(run, state, global_batch_size)

    fail_together(world, restore_loaders)
    run.schedule.mark_checked(run.progress)
    run.requests.stop = run.requests.stop or state.get("stop")
    run.stepper.wait(
        made.schedulers[index] for index in state.get("waiting_schedulers", ())
    )
    fail_together(
        world, lambda: _restore_of_users(run, state, callbacks, datamodule, differs)
    )


def _restore_weights(run: Fit, state: Mapping[str, Any], strict: bool) -> None:
    with fitting(
        "state_dict", RuntimeError
    ):  # torch's error names the weights that do not match
        weights = state["state_dict"]
        if (
            "optimizer_states" in state
        ):  # a run may deploy averages of the weights that it trains
            weights = {**weights, **state.get("current_model_state", {})}
        run.strategy.load_module_state(run.module, weights, strict)


def _restore_training(run: Fit, state: Mapping[str, Any], made: Optimizers) -> None:
    strategy, names = run.strategy, parameter_names(run.strategy, run.module)

    def begin() -> None:
        with fitting("optimizer_states"):
            if len(state["optimizer_states"]) != len(made.optimizers):
                found = f"{len(state['optimizer_states'])} optimizers were saved, {len(made.optimizers)} are configured"
                raise CheckpointError("optimizer_states", None, found)
            restore_flags(run, state.get("trainable", {}))
            for optimizer, saved in zip(
                made.optimizers, state["optimizer_states"], strict=True
            ):
                add_groups(
                    optimizer,
                    saved,
                    {names[id(p)]: p for p in run.module.parameters()},
                    strategy.sharded,
                )

    fail_together(strategy.world, begin)
    own = [owned_parameters(strategy, optimizer) for optimizer in made.optimizers]
    fail_together(strategy.world, lambda: _restore_steps(run, state, made, own, names))


def _restore_steps(
    run: Fit,
    state: Mapping[str, Any],
    made: Optimizers,
    own: list[Any],
    names: Mapping[int, str],
) -> None:
    changed: dict[int, dict[str, Any]] = {}
    with fitting("optimizer_states"):
        for optimizer, groups, saved in zip(
            made.optimizers, own, state["optimizer_states"], strict=True
        ):
            changed[id(optimizer)] = restore_optimizer(
                run.strategy,
                optimizer,
                groups,
                saved,
                names,
                run.say,
                state["state_dict"],
            )
    with fitting("lr_schedulers"):
        if len(state["lr_schedulers"]) != len(made.schedulers):
            found = f"{len(state['lr_schedulers'])} schedulers were saved, {len(made.schedulers)} are configured"
            raise CheckpointError("lr_schedulers", None, found)
        for config, saved in zip(made.schedulers, state["lr_schedulers"], strict=True):
            restore_scheduler(
                config.scheduler, saved, "lr" in changed.get(id(config.optimizer), {})
            )
    with fitting("precision"):
        run.precision.load_state_dict(state["precision"])
    with fitting("progress"):
        run.progress.load_state_dict(state["progress"])


def _restore_of_users(
    run: Fit,
    state: Mapping[str, Any],
    callbacks: list[Any],
    datamodule: DataModule | None,
    differs: str | None,
) -> None:
    with fitting("callbacks"):
        for callback in callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
    with fitting("datamodule"):
        if datamodule is not None and state["datamodule"]:
            datamodule.load_state_dict(state["datamodule"])
    _restore_of_rank(run, state, differs)


def ranks_differ(strategy: Strategy, state: Mapping[str, Any]) -> str | None:
    """How the ranks differ from those that saved; None where each rank's generators and buffers still match."""
    world, then = strategy.world, len(state.get("rng", ()))
    if then != world.size:
        return f"{then} ranks on {world.size}" if then else "without random states"
    # Ranks that get the same batch have agreed on what they draw.
    today = [int(row[0]) for row in world.agree([strategy.data.rank])]
    if state.get("data_ranks", today) == today:  # older checkpoints do not say
        return None
    return f"{then} ranks that now share batches among them in another way"


def _restore_of_rank(run: Fit, state: Mapping[str, Any], differs: str | None) -> None:
    rank = run.strategy.world.rank
    with fitting("metrics"):
        reports = run.strategy.reports.rank
        run.metrics.load_state_dict(
            state["metrics"][reports if reports < len(state["metrics"]) else 0]
        )
    if state.get("inside_step"):
        run.say(
            f"this checkpoint was taken inside step {run.progress.step + 1}, which runs again: what it drew and did to"
            " buffers before is not undone (trainer.request_checkpoint takes one between two steps)"
        )
    with fitting("rng"):
        if differs is None:
            restore_rng(state["rng"][rank], run.strategy.device)
        else:
            run.say(f"resuming {differs}: random layers draw different numbers")
    with fitting("buffers"):
        if "buffers" in state and differs is None:
            run.module.load_state_dict(
                names_in(run.module, state["buffers"][rank]), strict=False
            )


@contextmanager
def fitting(part: str, *passed: type[Exception]) -> Iterator[None]:
    """Turn every error of an object that refuses its saved state into a `CheckpointError`.

    Args:
        part: of the state.
        passed: errors that are raised unchanged.

    Raises:
        CheckpointError: in place of every other error.
    """
    as_they_are: tuple[type[Exception], ...] = (TrainerKitError, Warning, *passed)
    try:
        yield
    except as_they_are:
        raise
    except Exception as error:
        reason = f"it does not fit this run: {type(error).__name__}: {error}"
        raise CheckpointError(part, None, reason) from error


def _loader_state(run: Fit, done: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of this rank's loaders that ``done``, progress up to the last completed window, does not determine."""
    train = run.windows.feed.loader_state.state_dict(
        done["epoch"], done["epoch_batch"], done["batch"]
    )
    validation = [feed.loader_state.state_dict() for feed in run.validation.feeds]
    if train is None and not any(validation):
        return None
    return {"train": train, "validation": validation}


def _restore_loaders(
    run: Fit, state: Mapping[str, Any], global_batch_size: int | None
) -> None:
    """Set every loader to its position in the checkpoint; ``run.progress`` is restored already.

    Raises:
        CheckpointError: these ranks, or these loaders, do not have this position.
    """
    data = run.strategy.data
    ranks = len(state.get("loaders") or state["rng"])
    feed, rank = run.windows.feed, data.rank
    if ranks and ranks != data.size and global_batch_size is not None:
        run.say(
            f"global_batch_size={global_batch_size} stays: a batch is {feed.per_rank_batch_size} samples on each rank,"
            f" of {data.size} now and {ranks} before"
        )
    _convert_position(run, state.get("stride"), global_batch_size)
    compare_data(run, state.get("data"))
    saved = state.get("loaders")
    if saved is None:
        return
    feed.loader_state.load_state_dict([own and own["train"] for own in saved], rank)
    for i, validation in enumerate(run.validation.feeds):
        parts = [
            own["validation"][i] if own and i < len(own["validation"]) else None
            for own in saved
        ]
        validation.loader_state.load_state_dict(parts, rank)


def _convert_position(
    run: Fit, then: Sequence[Sequence[Any]] | None, global_batch_size: int | None
) -> None:
    """Convert the position inside the epoch, in micro-batches, to micro-batches of another size."""
    now, progress = run.windows.feed.stride, run.progress
    was = [(unit, number) for unit, number in then or ()]
    if was == now or then is None or not progress.epoch_batch:
        return
    batches, rest = (
        divmod(progress.epoch_batch * was[0][1], now[0][1]) if was and now else (0, 1)
    )
    ratios = {
        (old[1] * now[0][1], new[1] * was[0][1])
        for old, new in zip(was, now, strict=False)
    }
    units = [unit for unit, _ in now]
    alike = [unit for unit, _ in was] == units and set(units) <= {"samples", "batches"}
    if not alike or any(left != right for left, right in ratios):
        raise CheckpointError(
            "progress",
            "epoch_batch",
            f"a position in batches of {_named(was)} cannot be converted to batches of {_named(now)}",
            fix="resume with the same number of ranks and samples per batch, or from the end of an epoch",
        )
    if rest:
        raise CheckpointError(
            "progress",
            "epoch_batch",
            f"{progress.epoch_batch} batches of {_named(was)} are not a whole number of batches of {_named(now)}",
            fix="resume with the same number of ranks and samples per batch, or use global_batch_size",
        )
    keeps = (
        ""
        if global_batch_size or units[0] != "samples"
        else "; global_batch_size= keeps what a step is made of"
    )
    run.say(
        f"continuing at batch {batches} of the epoch: {progress.epoch_batch} batches of {_named(was)} were trained on,"
        f" they are of {_named(now)} now{keeps}"
    )
    progress.epoch_batch = batches


def _named(stride: Sequence[Sequence[Any]]) -> str:
    return " and ".join(dict.fromkeys(f"{number} {unit}" for unit, number in stride))
