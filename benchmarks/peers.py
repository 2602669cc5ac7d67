"""The same cases in other libraries, each written the way its documentation does."""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from workload import ACCUMULATION, CLIP, LOG_EVERY, Work, make_model, make_optimizer

__all__ = ["PEERS"]


def trainer_kit(work: Work) -> nn.Module:
    import trainer_kit

    # Only where it is given all the data: see `Samples.loader`.
    kwargs = _devices(work) | {"use_distributed_sampler": work.case == "ddp2"}
    return _trainer(work, trainer_kit.TrainModule, trainer_kit, kwargs)


def lightning(work: Work) -> nn.Module:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    import lightning.pytorch

    kwargs = _devices(work) | {"use_distributed_sampler": False}
    return _trainer(work, lightning.pytorch.LightningModule, lightning.pytorch, kwargs)


def _devices(work: Work) -> dict[str, Any]:
    return (
        {"strategy": "ddp", "devices": 2}
        if work.case.startswith("ddp2")
        else {"devices": 1}
    )


def _trainer(
    work: Work, base: type[Any], library: Any, kwargs: dict[str, Any]
) -> nn.Module:
    """Lightning and trainer_kit read the same script."""
    clock, logs, mean = work.clock, work.logs, work.mean
    usual = work.case == "usual"
    names = [f"value{index}" for index in range(logs)]

    class Module(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            step = clock.tick()
            if step in clock.points:
                clock.hit(step)
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            step = clock.tick()
            if step in clock.points:
                clock.hit(step)
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            if mean:
                self.log("loss", loss, batch_size=len(x))

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            step = clock.tick()
            if step in clock.points:
                clock.hit(step)
            x, _ = batch
            return self.net(x)

        def configure_optimizers(self) -> Any:
            return make_optimizer(self.net)

    class Logging(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            step = clock.tick()
            if step in clock.points:
                clock.hit(step)
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            if usual:
                self.log("loss", loss, prog_bar=True)
            for name in names:
                self.log(name, loss, on_step=True, on_epoch=True, batch_size=len(x))
            return loss

    class Captured(Module):
        # A captured step runs no Python of its own: the clock is the hook before it.
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return F.cross_entropy(self.net(x), y)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            step = clock.tick()
            if step in clock.points:
                clock.hit(step)

    class Idle(library.Callback):  # type: ignore[misc, name-defined]
        def __init__(self, index: int) -> None:
            self.index = index

        @property
        def state_key(self) -> str:
            return f"idle{self.index}"

    module = Logging() if usual or logs else Module()
    if work.case == "capture":
        module = Captured()
        kwargs |= {"compile": "step"}
    if usual:
        logger = library.loggers.TensorBoardLogger(work.directory)
        kwargs |= {
            "logger": logger,
            "log_every_n_steps": LOG_EVERY,
            "enable_model_summary": False,
        }
    elif work.case in ("log5", "eval_metric", "mean_loader", "idle50"):
        kwargs |= {
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
        }
        kwargs |= {
            "enable_model_summary": False,
            "callbacks": [Idle(index) for index in range(work.idle)],
        }
    else:
        kwargs |= {"barebones": True}
    if work.case == "accumulate":
        kwargs |= {"accumulate_grad_batches": ACCUMULATION, "gradient_clip_val": CLIP}
    trainer = library.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=work.directory, **kwargs
    )
    if work.evaluates:
        trainer.validate(module, work.batches, verbose=False)
        if mean:
            work.losses["loss"] = float(trainer.callback_metrics["loss"])
    elif work.case == "predict":
        trainer.predict(module, work.batches)
    else:
        trainer.fit(module, work.batches)
    clock.stop()
    return module.net


def fabric(work: Work) -> nn.Module:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", **_devices(work))
    fabric.launch()
    net = make_model()
    model, optimizer = fabric.setup(net, make_optimizer(net))

    def backward(loss: Any) -> None:
        fabric.backward(loss)

    if work.evaluates:
        _evaluate(work, model)
    elif work.case == "accumulate":
        tick, points = work.clock.tick, work.clock.points
        for index, (x, y) in enumerate(work.batches):
            step = tick()
            if step in points:
                work.clock.hit(step)
            last = (index + 1) % ACCUMULATION == 0
            with fabric.no_backward_sync(model, enabled=not last):
                fabric.backward(F.cross_entropy(model(x), y) / ACCUMULATION)
            if last:
                fabric.clip_gradients(model, optimizer, max_norm=CLIP)
                optimizer.step()
                optimizer.zero_grad()
    else:
        path = os.path.join(work.directory, "fabric.ckpt")
        save = {"model": model, "optimizer": optimizer}
        _train(work, model, optimizer, backward, save=lambda: fabric.save(path, save))
    work.clock.stop()
    return net


def accelerate(work: Work) -> nn.Module:
    from accelerate import Accelerator

    return _accelerated(work, Accelerator)


def raw(work: Work) -> nn.Module:
    from trainer_kit import Accelerator

    return _accelerated(work, Accelerator)


def _accelerated(work: Work, kind: Any) -> nn.Module:
    """Accelerate and trainer_kit's Accelerator read the same script."""
    windows = ACCUMULATION if work.case == "accumulate" else 1
    accelerator = kind(cpu=True, gradient_accumulation_steps=windows)
    net = make_model()
    model, optimizer = accelerator.prepare(net, make_optimizer(net))
    if work.evaluates:
        _evaluate(work, model)
    elif work.case == "accumulate":
        tick, points = work.clock.tick, work.clock.points
        for x, y in work.batches:
            step = tick()
            if step in points:
                work.clock.hit(step)
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
    else:
        path = os.path.join(work.directory, "accelerate")
        _train(
            work,
            model,
            optimizer,
            accelerator.backward,
            save=lambda: accelerator.save_state(path),
        )
    work.clock.stop()
    return net


def _train(work: Work, model: Any, optimizer: Any, backward: Any, save: Any) -> None:
    """The loop that users of Fabric and Accelerate keep; with the usual extras, as in `hand_written.usual`."""
    usual = work.case == "usual"
    tick, points = work.clock.tick, work.clock.points
    bar: Any = work.batches
    if usual:
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        writer, bar = SummaryWriter(work.directory), tqdm(work.batches)
    for index, (x, y) in enumerate(bar):
        step = tick()
        if step in points:
            work.clock.hit(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        backward(loss)
        optimizer.step()
        if usual and (index + 1) % LOG_EVERY == 0:
            value = loss.item()
            writer.add_scalar("loss", value, index + 1)
            bar.set_postfix(loss=value, refresh=False)
    if usual:
        save()
        writer.close()


def _evaluate(work: Work, model: Any) -> None:
    model.eval()
    total, samples = torch.zeros(()), 0
    tick, points = work.clock.tick, work.clock.points
    with torch.inference_mode():
        for x, y in work.batches:
            step = tick()
            if step in points:
                work.clock.hit(step)
            loss = F.cross_entropy(model(x), y)
            if work.mean:
                total += loss * len(x)
                samples += len(x)
    if work.mean:
        work.losses["loss"] = (total / samples).item()


def ignite(work: Work) -> nn.Module:
    from ignite.engine import Engine, Events

    net = make_model()
    model: Any = net
    if work.case.startswith("ddp2"):
        import ignite.distributed as idist

        model = idist.auto_model(net)
    optimizer = make_optimizer(net)
    clock, windows = work.clock, ACCUMULATION if work.case == "accumulate" else 1

    def train(engine: Any, batch: Any) -> Any:
        step = clock.tick()
        if step in clock.points:
            clock.hit(step)
        x, y = batch
        if windows == 1:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (loss if windows == 1 else loss / windows).backward()
        if windows == 1:
            optimizer.step()
        elif engine.state.iteration % windows == 0:
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    @torch.inference_mode()
    def evaluate(engine: Any, batch: Any) -> Any:
        step = clock.tick()
        if step in clock.points:
            clock.hit(step)
        x, y = batch
        return F.cross_entropy(net(x), y)

    evaluating = work.evaluates
    engine = Engine(evaluate if evaluating else train)
    if work.mean:
        from ignite.metrics import Average

        Average().attach(
            engine, "loss"
        )  # batches are of one size here, so this is the mean
    if work.case == "usual":
        _ignite_extras(work, engine, net, optimizer, Events)
    if evaluating:
        net.eval()
    engine.run(work.batches, max_epochs=1)
    if work.mean:
        work.losses["loss"] = float(engine.state.metrics["loss"])
    clock.stop()
    return net


def _ignite_extras(
    work: Work, engine: Any, net: nn.Module, optimizer: Any, events: Any
) -> None:
    from ignite.handlers import Checkpoint, DiskSaver, ProgressBar, TensorboardLogger

    logger = TensorboardLogger(log_dir=work.directory)
    every = events.ITERATION_COMPLETED(every=LOG_EVERY)
    logger.attach_output_handler(
        engine, every, tag="train", output_transform=lambda loss: {"loss": loss.item()}
    )
    ProgressBar().attach(
        engine, event_name=every, output_transform=lambda loss: {"loss": loss.item()}
    )
    saver = DiskSaver(os.path.join(work.directory, "ignite"), create_dir=True)
    engine.add_event_handler(
        events.EPOCH_COMPLETED,
        Checkpoint({"model": net, "optimizer": optimizer}, saver, n_saved=1),
    )
    engine.add_event_handler(events.COMPLETED, lambda: logger.close())


warnings.filterwarnings("ignore", module="(lightning|accelerate|ignite|torch).*")
PEERS = {
    "trainer_kit": trainer_kit,
    "lightning": lightning,
    "fabric": fabric,
    "accelerate": accelerate,
    "raw": raw,
    "ignite": ignite,
}
