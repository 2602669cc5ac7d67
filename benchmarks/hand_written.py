"""The hand-written loops that everything is compared with: what a user would write without a library."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workload import ACCUMULATION, CLIP, LOG_EVERY, Work, make_model, make_optimizer

__all__ = ["run"]


def run(work: Work) -> nn.Module:
    """The case's own loop; returns the trained module."""
    return {
        "usual": usual,
        "eval": evaluate,
        "eval_metric": evaluate,
        "eval_loader": evaluate,
        "mean_loader": evaluate,
        "predict": predict,
        "accumulate": accumulate,
        "ddp2": distributed,
        "ddp2_own": distributed,
    }.get(work.case, bare)(work)


def bare(work: Work) -> nn.Module:
    model = make_model()
    train(work, model, model)
    return model


def distributed(work: Work) -> nn.Module:
    model = make_model()
    train(work, model, DistributedDataParallel(model))
    return model


def train(work: Work, model: nn.Module, forward: nn.Module) -> None:
    optimizer = make_optimizer(model)
    tick, points = work.clock.tick, work.clock.points
    for x, y in work.batches:
        step = tick()
        if step in points:
            work.clock.hit(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(x), y)
        loss.backward()
        optimizer.step()
    work.clock.stop()


def accumulate(work: Work) -> nn.Module:
    model = make_model()
    optimizer = make_optimizer(model)
    tick, points = work.clock.tick, work.clock.points
    for index, (x, y) in enumerate(work.batches):
        step = tick()
        if step in points:
            work.clock.hit(step)
        loss = F.cross_entropy(model(x), y) / ACCUMULATION
        loss.backward()
        if (index + 1) % ACCUMULATION == 0:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
    work.clock.stop()
    return model


def usual(work: Work) -> nn.Module:
    from torch.utils.tensorboard import SummaryWriter
    from tqdm import tqdm

    model = make_model()
    optimizer = make_optimizer(model)
    writer = SummaryWriter(work.directory)
    bar = tqdm(work.batches)
    tick, points = work.clock.tick, work.clock.points
    for index, (x, y) in enumerate(bar):
        step = tick()
        if step in points:
            work.clock.hit(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if (index + 1) % LOG_EVERY == 0:
            value = loss.item()
            writer.add_scalar("loss", value, index + 1)
            bar.set_postfix(loss=value, refresh=False)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": len(work.batches),
    }
    torch.save(state, os.path.join(work.directory, "last.pt"))
    writer.close()
    work.clock.stop()
    return model


def evaluate(work: Work) -> nn.Module:
    model = make_model()
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
    work.clock.stop()
    return model


def predict(work: Work) -> nn.Module:
    model = make_model()
    model.eval()
    outputs = []
    tick, points = work.clock.tick, work.clock.points
    with torch.inference_mode():
        for x, _ in work.batches:
            step = tick()
            if step in points:
                work.clock.hit(step)
            outputs.append(model(x))
    work.clock.stop()
    return model
