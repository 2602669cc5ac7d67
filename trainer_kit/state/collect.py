"""Collects the whole state of a run into one dict for a checkpoint, and restores it, in a fixed order.

The keys of a state, what adds each, and what reads it: functions of this module where none is named. A state of
weights alone has the keys of `module_state` only.

============================ ============================= ======================================================
key                          written by                    read by
============================ ============================= ======================================================
``state_dict`` (``model``)   `module_state`                `_restore_weights`
``hyper_parameters``         `module_state`                ``load_from_checkpoint``
``hparams_name``             `module_state`                ``load_from_checkpoint``
``epoch``, ``global_step``   `module_state`                other programs: they are Lightning's names
``optimizer_states``         `_training_state`             `_restore_steps`; without it only weights are restored
``replica-N``                `_divergent_rank_state`       `restore` on rank N, in place of the shared parts
``precision``, ``progress``  `_training_state`             `_restore_steps`
``trainable``                `_training_state`             `_restore_training`: which parameters require gradients
``inside_step``              `_training_state`             `_restore_rank_state`: says that a step runs again
``owes_validation``          `_training_state`             `Settler.continue_from`
``waiting_schedulers``       `_training_state`             `restore`
``seed``                     `_training_state`             `RunFiles.continue_seed`
``stop``                     `_training_state`             `restore`
``stride``, ``data``         `_training_state`             `_restore_loaders`
``loggers``                  `Fit.about`                   `RunFiles.continue_logging`
``configuration``            `Fit.about`                   programs that show a run; a resume does not
``lr_schedulers``            `_user_state`                 `_restore_steps`
``callbacks``                `_user_state`                 `_restore_user_state`
``datamodule``               `_user_state`                 `_restore_user_state`
``datamodule_...``           `_user_state`                 ``DataModule.load_from_checkpoint``
``rng``, ``data_ranks``      `_add_user_state`             `describe_rank_change`, `_restore_rank_state`
``loaders``                  `_add_user_state`             `_restore_loaders`
``metrics``, ``buffers``     `_add_user_state`             `_restore_rank_state`
``current_model_state``      ``callbacks.WeightAveraging`` `_restore_weights`: the weights that are trained, where
                                                           ``state_dict`` has their averages
other keys                   ``on_save_checkpoint``        ``on_load_checkpoint``
============================ ============================= ======================================================

A checkpoint names the part ``state_dict`` ``model`` (`state.saving`, `state.resume`). An engine with
``Strategy.per_rank_state`` has other weights on each rank; inside ``Strategy.own_state`` it returns this rank's, which
become ``replica-N``, and outside of it those that all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from trainer_kit.checkpoint.encoding import encode
from trainer_kit.core.collective_errors import fail_together
from trainer_kit.core.datamodule import DataModule
from trainer_kit.core.display import holds_secret, mask_secrets, plural
from trainer_kit.core.errors import CheckpointError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.module import TrainModule
from trainer_kit.core.state_names import state_name
from trainer_kit.core.types import SavedState
from trainer_kit.state.checkpoint_errors import checkpoint_errors
from trainer_kit.state.data_changes import compare_data
from trainer_kit.state.optimizer_states import (
    add_groups,
    changed_flags,
    optimizer_state,
    owned_parameters,
    parameter_names,
    restore_flags,
    restore_optimizers,
    restore_scheduler,
    without_wrapper_names,
)
from trainer_kit.state.rank_states import (
    by_rank,
    collect_rank_states,
    describe_rank_change,
    restore_rank_buffers,
    restore_rank_rng,
)
from trainer_kit.step.optimizers import Optimizers
from trainer_kit.step.run import Fit
from trainer_kit.strategies.strategy import Strategy

__all__ = [
    "SavedState",
    "State",
    "collect",
    "completed_progress",
    "module_state",
    "plain_hparams",
    "rank_part_name",
    "restore",
    "weights_to_write",
]

State = dict[str, Any]
"""The state of a run, or one part of it, by name, as a checkpoint holds it."""
_Tensors = dict[str, Tensor]


def module_state(
    module: TrainModule,
    weights: Mapping[str, object],
    epoch: int,
    step: int,
) -> State:
    """Weights and hyperparameters: the part of the state that does not depend on a run."""
    state: State = {
        "state_dict": dict(weights),
        "hyper_parameters": plain_hparams(module.hparams)[0],
    }
    if module.hparams_name is not None:
        state["hparams_name"] = module.hparams_name
    state["epoch"] = epoch
    state["global_step"] = step
    return state


def plain_hparams(hparams: Mapping[str, object]) -> tuple[State, list[str]]:
    """The hyperparameters as a checkpoint holds them, and the names of those that it holds by a masked repr only.

    A large module is held by its repr: its weights are in the checkpoint already.
    """
    plain: State = {}
    refused: list[str] = []
    for name, value in hparams.items():
        if holds_secret(value, name) or not _can_be_stored(value, name):
            refused.append(name)
            plain[name] = {"repr": repr(mask_secrets(value, name))}
        else:
            plain[name] = value
    return plain, refused


_LARGE_MODULE: Final = 1 << 20
"""Bytes of weights above which a module among the hyperparameters is held by its repr."""


def _can_be_stored(value: object, name: str) -> bool:
    if isinstance(value, nn.Module):
        tensors = [*value.parameters(), *value.buffers()]
        if sum(tensor.nbytes for tensor in tensors) > _LARGE_MODULE:
            return False
    try:
        # The only test that agrees with a save is the save's own encoder.
        encode(value, {}, at=name, copy=False)
    except CheckpointError:
        return False
    return True


def collect(
    run: Fit,
    callbacks: Sequence[Callback],
    datamodule: DataModule | None,
    seed: int,
    weights_only: bool,
    hooks: bool = True,
    owes_validation: bool = False,
    everywhere: bool = False,
) -> State:
    """Collect the state after the last completed step. Every rank must call it.

    What differs between the ranks (generators, positions of loaders, metrics) is collected on rank 0, which writes it.

    Args:
        run: the fit.
        callbacks: whose ``state_dict`` is kept, by ``state_key``.
        datamodule: whose ``state_dict`` is kept, or None.
        seed: of the order of the data.
        weights_only: leave out everything but weights and hyperparameters.
        hooks: whether ``on_save_checkpoint`` is called.
        owes_validation: whether a validation that is due at this step has not run.
        everywhere: collect what differs between the ranks on each of them, for a state in memory.
    """
    world, progress = run.strategy.world, run.progress
    # Sharded engines may gather weights here, so all ranks take part even if only the first writes.
    weights = fail_together(world, lambda: run.strategy.module_state(run.module))
    state = module_state(run.module, weights, progress.epoch, progress.step)
    if not weights_only:
        state.update(_training_state(run, seed, owes_validation))
        # After the library's part: the state of loaders is relative to the progress in it.
        _add_user_state(run, state, callbacks, datamodule, everywhere)
    # Last, because the hooks may read, change and extend the whole checkpoint.
    if hooks:
        # A hook that raises on one rank ends the save on all of them.
        fail_together(world, partial(_call_hooks, run.bus.on_save_checkpoint, state))
    return state


def _training_state(run: Fit, seed: int, owes_validation: bool) -> State:
    """Optimizers, progress, and what else the library itself needs to resume."""
    progress, stepper = run.progress, run.stepper
    names = parameter_names(run.strategy, run.module)
    # A window notes the number of completed steps when it begins, and that number grows when it ends with a step.
    inside_step = run.windows.window.started == progress.step
    state: State = {"optimizer_states": _optimizer_states(run, names)}
    state.update(_divergent_rank_state(run, names))
    state["precision"] = run.precision.state_dict()
    state["progress"] = completed_progress(run)
    state["trainable"] = changed_flags(run)
    state["inside_step"] = inside_step
    # Inside a step the validation is not due yet: the step runs again first.
    state["owes_validation"] = owes_validation and not inside_step
    # They advance once the values of this step are there; the resumed run must not skip that.
    if stepper.waiting and not inside_step:
        state["waiting_schedulers"] = [
            index
            for index, scheduler in enumerate(stepper.configured.schedulers)
            if scheduler in stepper.waiting
        ]
    state["seed"] = seed
    if not run.schedule.may_stop(progress):
        # The request waits for the minimum of epochs or steps, in a resumed run too.
        state["stop"] = run.requests.stop
    state.update(run.about())
    # What a batch was made of, and what the data were: positions count batches, which may have another size on resume.
    state["stride"] = run.windows.feed.stride
    state["data"] = run.windows.feed.facts
    return state


def _optimizer_states(run: Fit, names: Mapping[int, str]) -> list[State]:
    optimizers = run.stepper.configured.optimizers
    return [optimizer_state(run.strategy, optimizer, names) for optimizer in optimizers]


class _RankContent(NamedTuple):
    """What the objects of each rank hold.

    Attributes:
        report_rank: its rank in the report group.
        reporter: the rank whose metrics count for this report rank.
        metrics: the state of its metrics.
        loaders: the state of its data loaders.
    """

    report_rank: int
    reporter: int
    metrics: object
    loaders: State | None


def _add_user_state(
    run: Fit,
    state: State,
    callbacks: Sequence[Callback],
    datamodule: DataModule | None,
    everywhere: bool,
) -> None:
    """Add the state of the user's objects, and that of every rank. Every rank must call it."""
    lent_weights: dict[str, Tensor] = {}
    for callback in callbacks:
        # While averages are swapped in, the live buffers are with the callback.
        lent_weights.update(callback.lent_weights)

    def collect_content() -> _RankContent:
        state.update(_user_state(run, callbacks, datamodule))
        return _RankContent(
            report_rank=run.strategy.reports.rank,
            reporter=run.strategy.reporter,
            metrics=run.metrics.state_dict(),
            loaders=_loader_state(run, state["progress"]),
        )

    ranks = collect_rank_states(
        run.strategy.world,
        run.strategy,
        [run.module],
        collect_content,
        lent_weights,
        everywhere=everywhere,
    )
    if ranks is None:
        return
    contents = ranks.contents
    state["rng"] = ranks.rng
    state["data_ranks"] = ranks.data_ranks
    # Once for each data rank, however many ranks read its batches: that number depends on the layout.
    loaders = [content.loaders for content in contents]
    state["loaders"] = by_rank(list(zip(ranks.data_ranks, loaders, strict=True)))
    state["metrics"] = by_rank(
        [
            (content.report_rank, contents[content.reporter].metrics)
            for content in contents
        ]
    )
    if ranks.buffers is not None:
        # A run has one module.
        state["buffers"] = [buffers[0] for buffers in ranks.buffers]


def _call_hooks(
    hooks: Iterable[Callable[..., object]],
    state: Mapping[str, object],
) -> None:
    for hook in hooks:
        hook(state)


def _user_state(
    run: Fit,
    callbacks: Sequence[Callback],
    datamodule: DataModule | None,
) -> State:
    """The state of the user's objects, any of which may raise."""
    schedulers = run.stepper.configured.schedulers
    callback_states: State = {}
    for callback in callbacks:
        callback_state = callback.state_dict()
        if callback_state:
            callback_states[callback.state_key] = dict(callback_state)
    state: State = {
        "lr_schedulers": [config.scheduler.state_dict() for config in schedulers],
        "callbacks": callback_states,
        "datamodule": {},
    }
    if datamodule is not None:
        state["datamodule"] = dict(datamodule.state_dict())
        state["datamodule_hyper_parameters"] = plain_hparams(datamodule.hparams)[0]
        if datamodule.hparams_name is not None:
            state["datamodule_hparams_name"] = datamodule.hparams_name
    return state


def _divergent_rank_state(run: Fit, names: Mapping[int, str]) -> State:
    """With an engine whose ranks have different weights, this rank's part, in addition to the shared part."""
    strategy = run.strategy
    if not strategy.per_rank_state:
        return {}
    # Without this context the strategy returns the state that all ranks share.
    with strategy.own_state():
        entries = strategy.module_state(run.module).items()
        weights = {name: value for name, value in entries if isinstance(value, Tensor)}
        optimizers = _optimizer_states(run, names)
    state = {"state_dict": weights, "optimizer_states": optimizers}
    return {rank_part_name(strategy.world.rank): state}


def rank_part_name(rank: int | str) -> str:
    """The name of the part of a checkpoint that belongs to one rank; with ``""`` the prefix of all of them."""
    return f"replica-{rank}"


def weights_to_write(
    strategy: Strategy,
    module: nn.Module,
    weights: Mapping[str, object],
) -> State:
    """The weights that this rank may write where all ranks write together.

    A tensor that several ranks hold is written by any of them, so only the first data rank writes running statistics.
    """
    if not strategy.sharded or not strategy.own_buffers or strategy.data.rank == 0:
        return dict(weights)
    buffers = {
        state_name(name) for name, _ in module.named_buffers(remove_duplicate=False)
    }
    return {name: value for name, value in weights.items() if name not in buffers}


def completed_progress(run: Fit) -> dict[str, int | float]:
    """Progress up to the last completed window: a resumed run repeats an unfinished window from its first batch."""
    progress, window = run.progress, run.windows.window
    state = progress.state_dict()
    if window.started == progress.step:
        # The window was begun and has not ended with a step: take back what it has counted.
        consumed = progress.epoch_batch - window.first
        state["epoch_batch"] -= consumed
        state["batch"] -= consumed
        state["samples"] -= sum(window.sizes[:consumed])
        # Tokens are counted once for a whole window, with its last batch.
        if consumed == window.count:
            state["tokens"] -= window.tokens
    return state


def restore(
    run: Fit,
    state: SavedState,
    configured: Optimizers,
    callbacks: Sequence[Callback],
    datamodule: DataModule | None,
    strict: bool,
    global_batch_size: int | None = None,
) -> None:
    """Restore everything at one point: after the module is wrapped and optimizers exist.

    A run that resumes calls it before ``on_fit_start``; a run that goes back to a held state, between two steps.

    An error on one rank is raised on all: the others would wait in the next collective call.

    The order is fixed: hooks see the checkpoint before anything is restored; weights, optimizers and schedulers,
    precision and progress; loaders, which need the progress; the user's objects; metrics, random generators and
    buffers last.
    """
    world = run.strategy.world
    # First: a hook may change the checkpoint, for example rename weights or set other optimizers.
    fail_together(world, partial(_call_hooks, run.bus.on_load_checkpoint, state))
    rank_change = describe_rank_change(run.strategy, state)
    # On other ranks than those that saved, every rank continues from the shared part.
    if rank_change is None:
        state = {**state, **state.get(rank_part_name(world.rank), {})}
    fail_together(world, lambda: _restore_weights(run, state, strict))
    if "optimizer_states" not in state:
        return  # weights only
    saved_optimizers = [
        without_wrapper_names(saved) for saved in state["optimizer_states"]
    ]
    state = {**state, "optimizer_states": saved_optimizers}
    _restore_training(run, state, configured)

    def restore_loaders() -> None:
        with checkpoint_errors("loaders"):
            _restore_loaders(run, state, global_batch_size)

    fail_together(world, restore_loaders)
    # After the position was converted: intervals that are complete there do not come due again.
    run.schedule.mark_validated(run.progress)
    # A hook may have requested a stop while the state was restored: that counts more than the saved request.
    run.requests.restore_stop(run.requests.stop or state.get("stop"))
    run.stepper.set_waiting(
        configured.schedulers[index] for index in state.get("waiting_schedulers", ())
    )

    def restore_user_state() -> None:
        _restore_user_state(state, callbacks, datamodule)
        # After the user's objects, which may draw random numbers while they load.
        _restore_rank_state(run, state, rank_change)

    fail_together(world, restore_user_state)


def _restore_weights(run: Fit, state: SavedState, strict: bool) -> None:
    # torch's RuntimeError names the weights that do not match, so it stays as it is.
    with checkpoint_errors("state_dict", RuntimeError):
        weights = state["state_dict"]
        # A run may deploy averages of the weights that it trains.
        if "optimizer_states" in state:
            weights = {**weights, **state.get("current_model_state", {})}
        run.strategy.load_module_state(run.module, weights, strict)


def _restore_training(run: Fit, state: SavedState, configured: Optimizers) -> None:
    strategy = run.strategy
    saved_optimizers = state["optimizer_states"]
    names = parameter_names(strategy, run.module)

    def restore_groups() -> None:
        with checkpoint_errors("optimizer_states"):
            if len(saved_optimizers) != len(configured.optimizers):
                raise CheckpointError(
                    "optimizer_states",
                    None,
                    f"{plural(len(saved_optimizers), 'optimizer was', 'optimizers were')} saved, "
                    f"{len(configured.optimizers)} are configured",
                )
            # Before groups are added: the parameters of an added group may have been unfrozen.
            restore_flags(run, state.get("trainable", {}))
            for optimizer, saved in zip(
                configured.optimizers, saved_optimizers, strict=True
            ):
                parameters = {
                    names[id(parameter)]: parameter
                    for parameter in run.module.parameters()
                }
                add_groups(optimizer, saved, parameters, strategy.sharded)

    fail_together(strategy.world, restore_groups)
    # Collective calls, so they stand outside of the functions that may raise on one rank.
    parameter_groups = [
        owned_parameters(strategy, optimizer) for optimizer in configured.optimizers
    ]
    fail_together(
        strategy.world,
        lambda: _restore_steps(run, state, configured, parameter_groups, names),
    )


def _restore_steps(
    run: Fit,
    state: SavedState,
    configured: Optimizers,
    parameter_groups: Sequence[Sequence[Sequence[nn.Parameter]]],
    names: Mapping[int, str],
) -> None:
    with checkpoint_errors("optimizer_states"):
        reconfigured = restore_optimizers(
            run.strategy,
            configured.optimizers,
            parameter_groups,
            state["optimizer_states"],
            names,
            run.say,
            state["state_dict"],
        )
    # After the optimizers: `reconfigured` says which learning rates the user has changed since.
    with checkpoint_errors("lr_schedulers"):
        saved_schedulers = state["lr_schedulers"]
        if len(saved_schedulers) != len(configured.schedulers):
            raise CheckpointError(
                "lr_schedulers",
                None,
                f"{len(saved_schedulers)} schedulers were saved, {len(configured.schedulers)} are configured",
            )
        for config, saved in zip(configured.schedulers, saved_schedulers, strict=True):
            # A learning rate that the user has changed is also the one from which the scheduler starts.
            options = reconfigured.get(id(config.optimizer), {})
            restore_scheduler(config.scheduler, saved, keeps_rates="lr" in options)
    with checkpoint_errors("precision"):
        run.precision.load_state_dict(state["precision"])
    with checkpoint_errors("progress"):
        run.progress.load_state_dict(state["progress"])


def _restore_user_state(
    state: SavedState,
    callbacks: Sequence[Callback],
    datamodule: DataModule | None,
) -> None:
    with checkpoint_errors("callbacks"):
        for callback in callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
    with checkpoint_errors("datamodule"):
        if datamodule is not None and state["datamodule"]:
            datamodule.load_state_dict(state["datamodule"])


def _restore_rank_state(run: Fit, state: SavedState, rank_change: str | None) -> None:
    rank = run.strategy.world.rank
    with checkpoint_errors("metrics"):
        saved_metrics = state["metrics"]
        report_rank = run.strategy.reports.rank
        # More report ranks now than when it was saved: all of them take the first one's values.
        if report_rank >= len(saved_metrics):
            report_rank = 0
        run.metrics.load_state_dict(saved_metrics[report_rank])
    if state.get("inside_step"):
        run.say(
            f"this checkpoint was taken inside step {run.progress.step + 1}, which runs again: what it drew and did to"
            " buffers before is not undone (trainer.request_checkpoint takes one between two steps)"
        )
    restore_rank_rng(run.strategy, state, rank_change, run.say)
    if "buffers" in state and rank_change is None:
        restore_rank_buffers([run.module], [state["buffers"][rank]])


def _loader_state(run: Fit, completed: SavedState) -> State | None:
    """The state of this rank's loaders that progress up to the last completed window does not determine."""
    train = run.windows.feed.loader_state.state_dict(
        completed["epoch"], completed["epoch_batch"], completed["batch"]
    )
    validation = [feed.loader_state.state_dict() for feed in run.validation.feeds]
    if train is None and not any(validation):
        return None
    return {"train": train, "validation": validation}


def _restore_loaders(
    run: Fit,
    state: SavedState,
    global_batch_size: int | None,
) -> None:
    """Set every loader to its position in the checkpoint; ``run.progress`` is restored already.

    Raises:
        CheckpointError: these ranks, or these loaders, do not have this position.
    """
    data, feed = run.strategy.data, run.windows.feed
    saved_ranks = len(state.get("loaders") or state["rng"])
    if saved_ranks and saved_ranks != data.size and global_batch_size is not None:
        run.say(
            f"global_batch_size={global_batch_size} stays: a batch is "
            f"{plural(feed.per_rank_batch_size or 1, 'sample')} on each rank,"
            f" of {data.size} now and {saved_ranks} before"
        )
    # The position counts batches of this run from here on, for what follows.
    change = _convert_position(run, state.get("stride"), global_batch_size)
    _load_loaders(run, state.get("loaders"))
    # Printed after the loaders are restored, which may refuse the position.
    if change is not None:
        run.say(change)
    compare_data(run, state.get("data"))


def _load_loaders(
    run: Fit,
    saved: Sequence[SavedState | None] | None,
) -> None:
    """Set every loader to its state; None in a checkpoint without any."""
    if saved is None:
        return
    feed = run.windows.feed
    rank = run.strategy.data.rank
    # The states of all ranks are passed: another number of ranks may share the position among themselves.
    train_states = [loaders and loaders["train"] for loaders in saved]
    feed.loader_state.load_state_dict(train_states, rank)
    for index, validation_feed in enumerate(run.validation.feeds):
        states = [_validation_state(loaders, index) for loaders in saved]
        validation_feed.loader_state.load_state_dict(states, rank)


def _validation_state(loaders: SavedState | None, index: int) -> State | None:
    """A data rank's saved state of one validation loader; None where the checkpoint has none."""
    if not loaders or index >= len(loaders["validation"]):
        return None
    state: State | None = loaders["validation"][index]
    return state


def _convert_position(
    run: Fit,
    saved_stride: Sequence[Sequence[Any]] | None,
    global_batch_size: int | None,
) -> str | None:
    """Convert the position inside the epoch, in micro-batches, to micro-batches of another size.

    Returns:
        What to tell the user; None if the size is the same.
    """
    progress, stride = run.progress, run.windows.feed.stride
    # Older checkpoints lack the entry; at the start of an epoch the position is 0 in any unit.
    if saved_stride is None or not progress.epoch_batch:
        return None
    before = [(unit, number) for unit, number in saved_stride]
    if before == stride:
        return None
    batches = progress.epoch_batch
    size_before, size_now = _stride_text(before), _stride_text(stride)
    if not _is_convertible(before, stride):
        raise CheckpointError(
            "progress",
            "epoch_batch",
            f"a position in batches of {size_before} cannot be converted to batches of {size_now}",
            fix="resume with the same number of ranks and samples per batch, or from the end of an epoch",
        )
    # All loaders changed by one ratio, so the first means all.
    position, remainder = divmod(batches * before[0][1], stride[0][1])
    # Rounding would repeat samples or leave some out.
    if remainder:
        raise CheckpointError(
            "progress",
            "epoch_batch",
            f"{plural(batches, 'batch')} of {size_before} do not fill whole batches of {size_now}",
            fix="resume with the same number of ranks and samples per batch, or use global_batch_size",
        )
    hint = ""
    if not global_batch_size and stride[0][0] == "samples":
        hint = "; global_batch_size= keeps the samples of a step"
    trained = plural(
        batches, f"batch of {size_before} was", f"batches of {size_before} were"
    )
    progress.epoch_batch = position
    return (
        f"continuing at batch {position} of the epoch: {trained} trained on,"
        f" batches have {size_now} now{hint}"
    )


_Stride = Sequence[tuple[str, int]]


def _is_convertible(before: _Stride, now: _Stride) -> bool:
    """Whether all loaders count in the same units as before, and their batches changed by one ratio."""
    units = [unit for unit, _ in now]
    units_before = [unit for unit, _ in before]
    if units != units_before or not set(units) <= {"samples", "batches"}:
        return False
    first_before, first_now = before[0][1], now[0][1]
    for (_, number_before), (_, number_now) in zip(before, now, strict=True):
        # Ratios are compared as products, to stay with whole numbers.
        if number_before * first_now != number_now * first_before:
            return False
    return True


def _stride_text(stride: _Stride) -> str:
    sizes = []
    for unit, number in stride:
        sizes.append(plural(number, unit.removesuffix("s"), unit))
    return " and ".join(dict.fromkeys(sizes))
