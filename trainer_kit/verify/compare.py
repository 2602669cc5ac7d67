"""Compares records of `verify` with its references, within the measured rounding of a dtype, and names what differs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from trainer_kit.core.display import plural
from trainer_kit.verify.recorder import Micro, OutputKey, Record

__all__ = [
    "Finding",
    "Judge",
    "Point",
    "percent",
    "relative_difference",
    "same_bits",
]

_FACTOR: Final = 10.0
"""How many times the measured rounding error a difference may be; docs/decisions/planning.md#0148 says why 10."""
_FLOOR: Final = 4.0
"""How many units in the last place a difference may be, where the measured error is accidentally smaller."""


@final
@dataclass(frozen=True, kw_only=True)
class Finding:
    """One difference that rounding does not explain.

    Attributes:
        kind: ``samples``, ``data``, ``forward``, ``backward``, ``loss``, ``gradients``, ``weights``, ``tied``,
            ``ranks``, ``buffers``, ``logged``, ``repeat``, ``resume``, ``validation``, ``layout`` or ``loop``.
        step: the optimizer step, from 0.
        where: the canonical name of the module or parameter, or the sample; empty: not one of them.
        text: what differs.
        hint: what usually causes it; empty: unknown.

    Example:
        >>> print(Finding(kind="gradients", step=0, where="layer.weight", text="off by 50%", hint="the loss is a sum"))
        step 0, layer.weight: off by 50% (the loss is a sum)
    """

    kind: str
    step: int
    where: str
    text: str
    hint: str = ""

    def __str__(self) -> str:
        location = f"step {self.step}"
        if self.where:
            location += f", {self.where}"
        text = f"{location}: {self.text}"
        if self.hint:
            text += f" ({self.hint})"
        return text


@final
@dataclass(frozen=True)
class Point:
    """One step of the curve: the largest relative difference of the weights, and what rounding explains.

    Attributes:
        step: the optimizer step, from 0.
        difference: the norm of a parameter's difference from the exact run, relative to the parameter's norm; the
            largest.
        allowed: what rounding explains of it.

    Example:
        >>> point = Point(step=2, difference=1e-7, allowed=2e-6)
        >>> point.difference <= point.allowed
        True
    """

    step: int
    difference: float
    allowed: float


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal in every bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.ndim == 0:
        # A scalar has no view as bytes. NaN counts as equal to NaN.
        both_nan = bool(a != a) and bool(b != b)
        return both_nan or bool(a == b)
    a_bytes = a.contiguous().view(torch.uint8)
    b_bytes = b.contiguous().view(torch.uint8)
    return torch.equal(a_bytes, b_bytes)


def percent(share: float) -> str:
    """A relative difference with the digits that it has, never ``0.0%``.

    Example:
        >>> percent(0.0142), percent(1.5), percent(3e-9)
        ('1.42%', '150%', '3e-07%')
    """
    return f"{100 * share:.3g}%"


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double()))


@final
class Judge:
    """Decides whether a difference is rounding.

    Args:
        exact: the plain loop in float64.
        rounded: the plain loop in the dtype of the run; with ``exact`` it measures the rounding error.
        eps: the rounding unit of that dtype.

    Attributes:
        largest: the largest difference so far, in units of the allowed rounding.
    """

    def __init__(self, exact: Record, rounded: Record, eps: float) -> None:
        self.exact = exact
        self.rounded = rounded
        self.eps = eps
        self.largest = 0.0

    def allowed(
        self, exact: Tensor, rounded: Tensor, eps: float | None = None
    ) -> float:
        """How far a tensor may be from the exact one."""
        if eps is None:
            eps = self.eps
        measured = _norm(rounded.double() - exact.double())
        floor = _FLOOR * eps * _norm(exact)
        # `excess` divides by this; it is 0 where all values are.
        return max(_FACTOR * measured, floor, torch.finfo(torch.float32).tiny)

    def excess(
        self, value: Tensor, exact: Tensor, rounded: Tensor, eps: float | None = None
    ) -> float:
        """The difference in units of the allowed rounding; above 1 it is more than rounding."""
        difference = _norm(value.double() - exact.double())
        # NaN compares as smaller than every limit, and would pass as equal.
        if math.isnan(difference):
            return float("inf")
        ratio = difference / self.allowed(exact, rounded, eps)
        self.largest = max(self.largest, ratio)
        return ratio

    def worst(
        self,
        values: Mapping[str, Tensor],
        exact: Mapping[str, Tensor],
        rounded: Mapping[str, Tensor],
        *,
        stored: bool = False,
    ) -> list[tuple[float, str]]:
        """The tensors that differ by more than rounding, the largest first; ``stored``: they keep their own dtype."""
        excesses = []
        for name, exact_value in exact.items():
            value = values.get(name)
            if value is None or value.shape != exact_value.shape:
                continue
            if not exact_value.is_floating_point():
                continue
            eps = None
            if stored:
                eps = torch.finfo(value.dtype).eps
            excess = self.excess(value, exact_value, rounded[name], eps)
            if excess > 1:
                excesses.append((excess, name))
        return sorted(excesses, reverse=True)

    # -- one kind of value each --------------------------------------------------------------------------------------

    def losses(self, run: Sequence[Record], step: int) -> Finding | None:
        """Compare the losses of each micro-batch."""
        ratios: list[float] = []
        largest = 0.0
        text = ""
        for key, micro in self._pairs(run, step):
            rounded = self.rounded.micros[key]
            for name, exact_loss in self.exact.micros[key].loss.items():
                if name not in micro.loss:
                    continue
                loss = float(micro.loss[name])
                expected = float(exact_loss)
                ratio = 1.0
                if expected:
                    ratio = loss / expected
                ratios.append(ratio)
                excess = self.excess(
                    micro.loss[name].reshape(()),
                    exact_loss.reshape(()),
                    rounded.loss[name].reshape(()),
                )
                loss_text = (
                    f"{name} is {loss:.6g}, and {expected:.6g} in the plain loop"
                )
                # The text of the largest difference: one line is enough to look for the cause.
                largest, text = max((largest, text), (excess, loss_text))
        if largest <= 1:
            return None
        hint = ""
        factor = _constant(ratios, self.eps)
        if factor is not None:
            cause = self._cause_of_factor(factor)
            hint = f"every loss is {factor:.4g} times the reference: {cause}"
        return Finding(kind="loss", step=step, where="", text=text, hint=hint)

    def gradients(self, run: Sequence[Record], step: int) -> Finding | None:
        """Compare the complete gradients."""
        exact = self.exact.gradients[step]
        rounded = self.rounded.gradients[step]
        differing: set[str] = set()
        gradients: dict[str, Tensor] = {}
        for record in run:
            rank_gradients = record.gradients.get(step, {})
            for _, name in self.worst(rank_gradients, exact, rounded):
                differing.add(name)
            # The first rank that has a gradient counts: stages of a pipeline have others.
            gradients = {**rank_gradients, **gradients}
        if not differing:
            return _missing_gradient(gradients, exact, step)
        name = _first_name(exact, differing)
        difference = percent(_relative(gradients[name], exact[name]))
        text = f"the gradient differs by {difference}"
        if len(differing) > 1:
            text += f", and those of {plural(len(differing) - 1, 'more parameter')}"
        hint = self._cause_of_gradients(run, step, gradients, exact)
        return Finding(kind="gradients", step=step, where=name, text=text, hint=hint)

    def _cause_of_gradients(
        self,
        run: Sequence[Record],
        step: int,
        gradients: Mapping[str, Tensor],
        exact: Mapping[str, Tensor],
    ) -> str:
        """Why gradients differ: they were not exchanged, or scaled by a factor; empty: unknown."""
        if _ranks_differ(run, step):
            return "the ranks have different gradients: they were not synchronized"
        # One factor for all parameters, by least squares. What is left must be rounding;
        # a few gradients that happen to be multiples are no wrong factor.
        names = [name for name in exact if name in gradients]
        values = torch.cat([gradients[name].double().flatten() for name in names])
        expected = torch.cat([exact[name].double().flatten() for name in names])
        factor = 0.0
        if _norm(expected):
            factor = float(values @ expected / (expected @ expected))
        remainder = _norm(values - factor * expected)
        if remainder > 100 * _FACTOR * self.eps * _norm(values):
            return ""
        cause = self._cause_of_factor(factor)
        return f"every gradient is {factor:.4g} times the reference: {cause}"

    def weights(self, run: Sequence[Record], step: int) -> Finding | None:
        """Compare the complete weights after the step; buffers only where one rank has them."""
        weights: dict[str, Tensor] = {}
        for record in run:
            weights = {**record.weights.get(step, {}), **weights}
        for group in self.exact.tied:
            tied = [weights[name] for name in group if name in weights]
            if not all(same_bits(tied[0], value) for value in tied[1:]):
                return Finding(
                    kind="tied",
                    step=step,
                    where=" and ".join(group),
                    text="one parameter in the plain loop, and two different ones in the run",
                    hint="the module ties these weights, and one of the names was assigned a new tensor",
                )
        exact = self.exact.weights[step]
        # The loop ends with the buffers of one rank; `compare_buffers` judges those of many.
        if len(run) > 1:
            trained = self._trained_names()
            exact = {name: value for name, value in exact.items() if name in trained}
        return self._weights(weights, exact, step)

    def _trained_names(self) -> set[str]:
        names: set[str] = set()
        for gradients in self.exact.gradients.values():
            names.update(gradients)
        for group in self.exact.tied:
            names.update(group)
        return names

    def trained(self, run: Sequence[Record], step: int) -> Finding | None:
        """Compare the weights that have gradients, without buffers."""
        names = self.exact.gradients[step]
        exact = {
            name: value
            for name, value in self.exact.weights[step].items()
            if name in names
        }
        return self._weights(run[0].weights[step], exact, step)

    def _weights(
        self, weights: Mapping[str, Tensor], exact: Mapping[str, Tensor], step: int
    ) -> Finding | None:
        differing = self.worst(weights, exact, self.rounded.weights[step], stored=True)
        if not differing:
            return None
        name = _first_name(exact, {name for _, name in differing})
        difference = percent(_relative(weights[name], exact[name]))
        return Finding(
            kind="weights",
            step=step,
            where=name,
            text=f"the weights differ by {difference} after the step",
            hint="the gradients agree: look at clipping, the optimizer and its schedule",
        )

    def ranks(self, run: Sequence[Record], step: int) -> Finding | None:
        """Compare the copies that several ranks hold."""
        first = run[0].local.get(step, {})
        for record in run[1:]:
            for name, value in record.local.get(step, {}).items():
                expected = first.get(name)
                if expected is None or expected.shape != value.shape:
                    continue
                if same_bits(expected, value):
                    continue
                text = f"rank {record.data_rank} has a different value than rank 0 after the step"
                if name not in record.buffers:
                    # A kernel may sum in another order on each rank.
                    if _differs_beyond_rounding(value, expected):
                        return Finding(kind="ranks", step=step, where=name, text=text)
                    continue
                # Without `own_buffers` the next forward sends the buffers of rank 0; for
                # batch norms there is a note.
                is_norm = name.rpartition(".")[0] in record.norms
                if record.own_buffers and not is_norm:
                    return Finding(
                        kind="buffers",
                        step=step,
                        where=name,
                        text=text,
                        hint="no rank broadcasts this buffer; checkpoints contain the buffer of rank 0",
                    )
        return None

    def logged(self, run: Sequence[Record], step: int) -> Finding | None:
        """Compare the values that the loggers get."""
        values = run[0].logged.get(step, {})
        rounded = self.rounded.logged.get(step, {})
        for name, expected in self.exact.logged.get(step, {}).items():
            value = values.get(name)
            if value is None or name not in rounded:
                continue
            excess = self.excess(
                torch.tensor(value),
                torch.tensor(expected).double(),
                torch.tensor(rounded[name]),
            )
            if excess > 1:
                text = f"logged as {value:.6g}, and {expected:.6g} by the plain loop"
                return Finding(kind="logged", step=step, where=name, text=text)
        return None

    def modules(self, run: Sequence[Record], step: int) -> Finding | None:
        """The first module, in order of computation, whose output or its gradient differs by more than rounding."""
        pairs = sorted(self._pairs(run, step), key=lambda pair: pair[0])
        for key, micro in pairs:
            exact = self.exact.micros[key]
            output = self._differing_output(micro, exact, self.rounded.micros[key])
            if output is not None:
                return _module_finding("forward", "the output", step, *output)
        # A gradient is judged only where all outputs agree: a wrong output has wrong ones.
        divisor = run[0].divisor
        for key, micro in pairs:
            exact = self.exact.micros[key]
            rounded = self.rounded.micros[key]
            flow = self._differing_flow(micro, exact, rounded, divisor)
            if flow is not None:
                subject = "the gradient of the output"
                return _module_finding("backward", subject, step, *flow)
        return None

    def _differing_output(
        self, micro: Micro, exact: Micro, rounded: Micro
    ) -> tuple[OutputKey, float] | None:
        """The first output of a module that differs, with its relative difference."""
        if micro.watched is None or exact.watched is None or rounded.watched is None:
            return None
        return self._differing_value(
            micro.watched.outputs, exact.watched.outputs, rounded.watched.outputs, 1
        )

    def _differing_flow(
        self, micro: Micro, exact: Micro, rounded: Micro, divisor: int
    ) -> tuple[OutputKey, float] | None:
        """Likewise for the gradients of outputs, of which the run's are multiplied by ``divisor``."""
        if micro.watched is None or exact.watched is None or rounded.watched is None:
            return None
        return self._differing_value(
            micro.watched.flows, exact.watched.flows, rounded.watched.flows, divisor
        )

    def _differing_value(
        self,
        values: Mapping[OutputKey, Tensor],
        exact: Mapping[OutputKey, Tensor],
        rounded: Mapping[OutputKey, Tensor],
        divisor: int,
    ) -> tuple[OutputKey, float] | None:
        for key, expected in exact.items():
            value = values.get(key)
            if value is None or key not in rounded or value.shape != expected.shape:
                continue
            scaled = value.double() / divisor
            if self.excess(scaled, expected, rounded[key]) > 1:
                return key, _relative(scaled, expected)
        return None

    def curve(self, run: Sequence[Record]) -> list[Point]:
        """The largest relative difference of the weights, step by step."""
        points = []
        for step, exact in self.exact.weights.items():
            weights = run[0].weights.get(step, {})
            rounded = self.rounded.weights[step]
            difference = 0.0
            allowed = 0.0
            for name in self.exact.gradients[step]:
                value = weights.get(name)
                if value is None or value.shape != exact[name].shape:
                    continue
                norm = _norm(exact[name]) or 1.0
                distance = _norm(value.double() - exact[name].double())
                difference = max(difference, distance / norm)
                eps = torch.finfo(value.dtype).eps
                limit = self.allowed(exact[name], rounded[name], eps)
                allowed = max(allowed, limit / norm)
            points.append(Point(step, difference, allowed))
        return points

    def _pairs(
        self, run: Sequence[Record], step: int
    ) -> list[tuple[tuple[int, int], Micro]]:
        """The micro-batches of a run, each with its key in the reference."""
        micro_batches: dict[tuple[int, int], Micro] = {}
        for record in run:
            for (micro_step, index), micro in record.micros.items():
                # The plain loop runs the micro-batches of all data ranks in turn.
                key = micro_step, index * record.data_ranks + record.data_rank
                if micro_step == step and key in self.exact.micros:
                    # Ranks that share their data have the same micro-batch.
                    micro_batches.setdefault(key, micro)
        return list(micro_batches.items())

    def _cause_of_factor(self, factor: float) -> str:
        """What scales values by a factor."""
        ranks = self.exact.data_ranks
        micro_batches = Counter(step for step, _ in self.exact.micros)
        window = max(micro_batches.values(), default=1) // ranks
        causes = []
        if ranks > 1 and _is_close(factor * ranks):
            causes.append(f"averaged over the {plural(ranks, 'rank')} twice")
        if ranks > 1 and _is_close(factor / ranks):
            causes.append(
                f"summed over the {plural(ranks, 'rank')} instead of averaged"
            )
        if window > 1 and (_is_close(factor * window) or _is_close(factor / window)):
            causes.append(
                f"divided wrongly by the {window} micro-batches of accumulation"
            )
        if not causes:
            return "a wrong scaling factor, for example of accumulation"
        return ", or ".join(causes)


def _module_finding(
    kind: str, subject: str, step: int, key: OutputKey, difference: float
) -> Finding:
    """The finding for an output of a module; of a module that is called several times it names the call."""
    name, call, _ = key
    text = f"{subject} differs"
    if call:
        text += f", call {call + 1}"
    text += f": by {percent(difference)}"
    return Finding(kind=kind, step=step, where=name, text=text)


def _missing_gradient(
    gradients: Mapping[str, Tensor], exact: Mapping[str, Tensor], step: int
) -> Finding | None:
    """A parameter of which the run has no gradient at all."""
    if not gradients:
        return None
    for name, value in exact.items():
        # No gradient and one that is 0 everywhere train alike.
        if name not in gradients and float(value.abs().max()) > 0:
            return Finding(
                kind="gradients",
                step=step,
                where=name,
                text="the run has no gradient of this parameter",
            )
    return None


def _ranks_differ(run: Sequence[Record], step: int) -> bool:
    """Whether the gradients of the ranks differ from those of rank 0."""
    first = run[0].gradients.get(step, {})
    for record in run[1:]:
        for name, value in record.gradients.get(step, {}).items():
            if name in first and _differs_beyond_rounding(value, first[name]):
                return True
    return False


def _differs_beyond_rounding(value: Tensor, other: Tensor) -> bool:
    """Whether two ranks' values differ by more than their last places."""
    distance = _norm(value.double() - other.double())
    return distance > _FLOOR * torch.finfo(other.dtype).eps * _norm(other)


def _first_name(exact: Mapping[str, Tensor], names: set[str]) -> str:
    """The first of the names in the order of the module."""
    return next(name for name in exact if name in names)


def _is_close(factor: float) -> bool:
    # Rounding of low precisions and of a fitted factor; two candidates are further apart.
    return abs(factor - 1) < 0.02


def _constant(ratios: Sequence[float], eps: float) -> float | None:
    """The factor that all ratios have; None where they differ, or are 1."""
    if not ratios:
        return None
    factor = ratios[0]
    if max(ratios) - min(ratios) > 100 * eps * abs(factor):
        return None
    if abs(factor - 1) < 1e-3:
        return None
    return factor


def _relative(value: Tensor, exact: Tensor) -> float:
    return _norm(value.double() - exact.double()) / (_norm(exact) or 1.0)


def relative_difference(
    values: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> dict[str, float]:
    """The relative difference of each tensor that both have."""
    return {
        name: _relative(values[name], value)
        for name, value in exact.items()
        if name in values
    }
