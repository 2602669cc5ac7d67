"""Compares records of `verify` with its references, within the measured rounding of a dtype, and names what differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from trainer_kit.planning.verify_recorder import Micro, Record, Watched

__all__ = [
    "Finding",
    "Judge",
    "Point",
    "compare_order",
    "compare_samples",
    "percent",
    "relative_difference",
    "same_bits",
]

_FACTOR: Final = 10.0
"""How many times the measured rounding error a difference may be; docs/decisions/0148 says why 10."""
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
    """

    kind: str
    step: int
    where: str
    text: str
    hint: str = ""

    def __str__(self) -> str:
        at = f"step {self.step}" + (f", {self.where}" if self.where else "")
        return f"{at}: {self.text}" + (f" ({self.hint})" if self.hint else "")


@final
@dataclass(frozen=True)
class Point:
    """One step of the curve: the largest relative difference of the weights, and what rounding explains."""

    step: int
    difference: float
    allowed: float


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal in every bit."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return (
        bool(
            torch.equal(
                a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
            )
        )
        if a.ndim
        else (bool(a == b) or bool(a != a and b != b))
    )


def percent(part: float) -> str:
    """A relative difference with the digits that it has, never ``0.0%``.

    Example:
        >>> percent(0.0142), percent(1.5), percent(3e-9)
        ('1.42%', '150%', '3e-07%')
    """
    return f"{100 * part:.3g}%"


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double()))


@final
class Judge:
    """Decides whether a difference is rounding.

    Args:
        exact: the plain loop in float64.
        rounded: the plain loop in the dtype of the run; with ``exact`` it measures the rounding error.
        eps: of that dtype.
    """

    def __init__(self, exact: Record, rounded: Record, eps: float) -> None:
        self.exact, self.rounded, self.eps = exact, rounded, eps
        self.largest = 0.0

    def allowed(
        self, exact: Tensor, rounded: Tensor, eps: float | None = None
    ) -> float:
        """How far a tensor may be from the exact one."""
        own = _norm(rounded.double() - exact.double())
        floor = _FLOOR * (self.eps if eps is None else eps) * _norm(exact)
        return max(_FACTOR * own, floor, torch.finfo(torch.float32).tiny)

    def excess(
        self, found: Tensor, exact: Tensor, rounded: Tensor, eps: float | None = None
    ) -> float:
        """The difference in units of the allowed rounding; above 1 it is more than rounding."""
        difference = _norm(found.double() - exact.double())
        if difference != difference:
            return float("inf")
        ratio = difference / self.allowed(exact, rounded, eps)
        self.largest = max(self.largest, ratio)
        return ratio

    def worst(
        self,
        found: Mapping[str, Tensor],
        exact: Mapping[str, Tensor],
        rounded: Mapping[str, Tensor],
        *,
        stored: bool = False,
    ) -> list[tuple[float, str]]:
        """The tensors that differ by more than rounding, the largest first; ``stored``: they keep their own dtype."""
        shared = [
            name
            for name in exact
            if name in found and found[name].shape == exact[name].shape
        ]
        shared = [name for name in shared if exact[name].is_floating_point()]
        judged = []
        for name in shared:
            eps = torch.finfo(found[name].dtype).eps if stored else None
            judged.append(
                (self.excess(found[name], exact[name], rounded[name], eps), name)
            )
        return sorted((pair for pair in judged if pair[0] > 1), reverse=True)

    # -- one kind of value each --------------------------------------------------------------------------------------

    def losses(self, run: Sequence[Record], step: int) -> Finding | None:
        """Compare the losses of each micro-batch."""
        ratios = []
        wrong: list[tuple[float, str]] = []
        for at, mine in self._pairs(run, step):
            exact, rounded = self.exact.micros[at], self.rounded.micros[at]
            for name, value in exact.loss.items():
                if name in mine.loss:
                    found = mine.loss[name]
                    ratios.append(float(found) / float(value) if float(value) else 1.0)
                    text = f"{name} is {float(found):.6g}, and {float(value):.6g} in the plain loop"
                    wrong.append(
                        (
                            self.excess(
                                found.reshape(()),
                                value.reshape(()),
                                rounded.loss[name].reshape(()),
                            ),
                            text,
                        )
                    )
        bad = max(wrong, default=(0.0, ""))
        if bad[0] <= 1:
            return None
        factor = _constant(ratios, self.eps)
        hint = (
            ""
            if factor is None
            else f"every loss is {factor:.4g} times the reference: {self._factor(factor)}"
        )
        return Finding(kind="loss", step=step, where="", text=bad[1], hint=hint)

    def gradients(self, run: Sequence[Record], step: int) -> Finding | None:
        """Compare the complete gradients."""
        exact, rounded = self.exact.gradients[step], self.rounded.gradients[step]
        wrong: list[tuple[float, str]] = []
        merged: dict[str, Tensor] = {}
        for record in run:
            wrong += self.worst(record.gradients.get(step, {}), exact, rounded)
            merged = {**record.gradients.get(step, {}), **merged}
        if not wrong:
            return self._missing(merged, exact, step)
        name = self._first(exact, {name for _, name in wrong})
        several = len({name for _, name in wrong})
        hint = self._of_gradients(run, step, merged, exact)
        text = (
            f"the gradient differs by {percent(_relative(merged[name], exact[name]))}"
        )
        text += f", and those of {several - 1} more parameters" if several > 1 else ""
        return Finding(kind="gradients", step=step, where=name, text=text, hint=hint)

    def _missing(
        self, merged: Mapping[str, Tensor], exact: Mapping[str, Tensor], step: int
    ) -> Finding | None:
        missing = [
            name
            for name in exact
            if name not in merged and float(exact[name].abs().max()) > 0
        ]
        if not merged or not missing:
            return None
        return Finding(
            kind="gradients",
            step=step,
            where=missing[0],
            text="the run has no gradient of this parameter",
        )

    def _of_gradients(
        self,
        run: Sequence[Record],
        step: int,
        merged: Mapping[str, Tensor],
        exact: Mapping[str, Tensor],
    ) -> str:
        first = run[0].gradients.get(step, {})
        differ = [
            name
            for record in run[1:]
            for name, value in record.gradients.get(step, {}).items()
            if name in first and self._far(value, first[name])
        ]
        if differ:
            return "the ranks have different gradients: they were not exchanged"
        names = [name for name in exact if name in merged]
        flat = torch.cat([merged[name].double().flatten() for name in names])
        true = torch.cat([exact[name].double().flatten() for name in names])
        factor = float(flat @ true / (true @ true)) if _norm(true) else 0.0
        if _norm(flat - factor * true) > 100 * _FACTOR * self.eps * _norm(flat):
            return ""
        return f"every gradient is {factor:.4g} times the reference: {self._factor(factor)}"

    def weights(self, run: Sequence[Record], step: int) -> Finding | None:
        """Compare the complete weights after the step; buffers only where one rank has them."""
        exact = self.exact.weights[step]
        merged: dict[str, Tensor] = {}
        for record in run:
            merged = {**record.weights.get(step, {}), **merged}
        trained = {
            name for found in self.exact.gradients.values() for name in found
        } | {name for group in self.exact.tied for name in group}
        chosen = {
            name: value
            for name, value in exact.items()
            if name in trained or len(run) == 1
        }
        for group in self.exact.tied:
            held = [merged[name] for name in group if name in merged]
            if any(not same_bits(held[0], other) for other in held[1:]):
                return Finding(
                    kind="tied",
                    step=step,
                    where=" and ".join(group),
                    text="one parameter in the plain loop, and two different ones in the run",
                    hint="the module ties these weights, and one of the names was assigned a new tensor",
                )
        return self._weights(merged, chosen, step)

    def trained(self, run: Sequence[Record], step: int) -> Finding | None:
        """Compare the weights that have gradients, without buffers."""
        names, exact = self.exact.gradients[step], self.exact.weights[step]
        return self._weights(
            run[0].weights[step], {n: v for n, v in exact.items() if n in names}, step
        )

    def _weights(
        self, merged: Mapping[str, Tensor], exact: Mapping[str, Tensor], step: int
    ) -> Finding | None:
        wrong = self.worst(merged, exact, self.rounded.weights[step], stored=True)
        if not wrong:
            return None
        name = self._first(exact, {name for _, name in wrong})
        text = f"the weights differ by {percent(_relative(merged[name], exact[name]))} after the step"
        hint = "the gradients agree: look at clipping, the optimizer and its schedule"
        return Finding(kind="weights", step=step, where=name, text=text, hint=hint)

    def ranks(self, run: Sequence[Record], step: int) -> Finding | None:
        """Compare the copies that several ranks hold."""
        first = run[0].local.get(step, {})
        for record in run[1:]:
            for name, value in record.local.get(step, {}).items():
                if (
                    name not in first
                    or first[name].shape != value.shape
                    or same_bits(first[name], value)
                ):
                    continue
                buffer = name in record.buffers
                if buffer and (
                    not record.own_buffers or name.rpartition(".")[0] in record.norms
                ):
                    continue  # the next forward sends those of rank 0; for batch norms there is a note
                if not buffer and not self._far(value, first[name]):
                    continue
                return Finding(
                    kind="buffers" if buffer else "ranks",
                    step=step,
                    where=name,
                    text=f"rank {record.place} has a different value than rank 0 after the step",
                    hint="no rank sends this buffer; checkpoints hold that of rank 0"
                    if buffer
                    else "",
                )
        return None

    def logged(self, run: Sequence[Record], step: int) -> Finding | None:
        """Compare the values that the loggers get."""
        exact, rounded = (
            self.exact.logged.get(step, {}),
            self.rounded.logged.get(step, {}),
        )
        for name, value in exact.items():
            found = run[0].logged.get(step, {}).get(name)
            if found is None or name not in rounded:
                continue
            if (
                self.excess(
                    torch.tensor(found),
                    torch.tensor(value).double(),
                    torch.tensor(rounded[name]),
                )
                > 1
            ):
                text = f"logged as {found:.6g}, and {value:.6g} by the plain loop"
                return Finding(kind="logged", step=step, where=name, text=text)
        return None

    def modules(self, run: Sequence[Record], step: int) -> Finding | None:
        """The first module, in order of computation, whose output or its gradient differs by more than rounding."""
        pairs = [
            (mine, self.exact.micros[at], self.rounded.micros[at])
            for at, mine in sorted(self._pairs(run, step), key=lambda pair: pair[0])
        ]
        for kind, what in (
            ("forward", "output"),
            ("backward", "gradient of the output"),
        ):
            for mine, exact, rounded in pairs:
                found = self._module(mine, exact, rounded, kind, run[0].divisor)
                if found is not None:
                    (name, call, _), text = found
                    again = f", call {call + 1}" if call else ""
                    return Finding(
                        kind=kind,
                        step=step,
                        where=name,
                        text=f"the {what} differs{again}: {text}",
                    )
        return None

    def _module(
        self, mine: Micro, exact: Micro, rounded: Micro, kind: str, divisor: int
    ) -> tuple[tuple[str, int, int], str] | None:
        if mine.watched is None or exact.watched is None or rounded.watched is None:
            return None

        def of(watched: Watched) -> dict[tuple[str, int, int], Tensor]:
            return watched.outputs if kind == "forward" else watched.flows

        scale = divisor if kind == "backward" else 1
        for key, value in of(exact.watched).items():
            found, other = of(mine.watched).get(key), of(rounded.watched).get(key)
            if found is None or other is None or found.shape != value.shape:
                continue
            if self.excess(found.double() / scale, value, other) > 1:
                return key, f"by {percent(_relative(found.double() / scale, value))}"
        return None

    def _far(self, found: Tensor, other: Tensor) -> bool:
        """Whether two ranks' values differ by more than their last places."""
        return _norm(found.double() - other.double()) > _FLOOR * torch.finfo(
            other.dtype
        ).eps * _norm(other)

    def curve(self, run: Sequence[Record]) -> list[Point]:
        """The largest relative difference of the weights, step by step."""
        points = []
        for step, exact in self.exact.weights.items():
            found = run[0].weights.get(step, {})
            names = [
                n
                for n in self.exact.gradients[step]
                if n in found and found[n].shape == exact[n].shape
            ]
            rounded = self.rounded.weights[step]
            norms = {name: _norm(exact[name]) or 1.0 for name in names}
            far = [
                _norm(found[name].double() - exact[name].double()) / norms[name]
                for name in names
            ]
            eps = {name: torch.finfo(found[name].dtype).eps for name in names}
            allowed = [
                self.allowed(exact[name], rounded[name], eps[name]) / norms[name]
                for name in names
            ]
            points.append(Point(step, max(far, default=0.0), max(allowed, default=0.0)))
        return points

    def _pairs(
        self, run: Sequence[Record], step: int
    ) -> list[tuple[tuple[int, int], Micro]]:
        """The micro-batches of a run, each with its key in the reference."""
        found: dict[tuple[int, int], Micro] = {}
        for record in run:
            for (at, index), micro in record.micros.items():
                key = (at, index * record.places + record.place)
                if at == step and key in self.exact.micros:
                    found.setdefault(key, micro)
        return list(found.items())

    def _first(self, exact: Mapping[str, Tensor], names: set[str]) -> str:
        return next(name for name in exact if name in names)

    def _factor(self, factor: float) -> str:
        places = self.exact.places
        per_step = Counter(at for at, _ in self.exact.micros)
        window = max(per_step.values(), default=1) // places
        causes = []
        if places > 1 and abs(factor * places - 1) < 0.02:
            causes.append(f"averaged over the {places} ranks twice")
        if places > 1 and abs(factor / places - 1) < 0.02:
            causes.append(f"summed over the {places} ranks instead of averaged")
        if window > 1 and (
            abs(factor * window - 1) < 0.02 or abs(factor / window - 1) < 0.02
        ):
            causes.append(
                f"divided wrongly by the {window} micro-batches of accumulation"
            )
        return (
            ", or ".join(causes)
            or "a wrong scaling factor, for example of accumulation"
        )


def _constant(ratios: Iterable[float], eps: float) -> float | None:
    found = list(ratios)
    if (
        not found
        or max(found) - min(found) > 100 * eps * abs(found[0])
        or abs(found[0] - 1) < 1e-3
    ):
        return None
    return found[0]


def _relative(found: Tensor, exact: Tensor) -> float:
    return _norm(found.double() - exact.double()) / (_norm(exact) or 1.0)


def relative_difference(
    found: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> dict[str, float]:
    """The relative difference of each tensor that both have."""
    return {
        name: _relative(found[name], value)
        for name, value in exact.items()
        if name in found
    }


def compare_order(
    run: Sequence[Record], plan: list[int] | None, steps: int
) -> Finding | None:
    """Compare the samples of each step with those that one process reads; each step may have them in any order.

    Args:
        run: one record for each rank.
        plan: the dataset's indices as one process reads them; None: not known.
        steps: of the run.
    """
    done = 0
    for step in range(steps):
        found: dict[tuple[int, int], list[int]] = {}
        for record in run:
            for (at, index), micro in record.micros.items():
                if at == step and micro.ids is not None:
                    found[index, record.place] = micro.ids
        ids = [one for key in sorted(found) for one in found[key]]
        expected = None if plan is None else plan[done : done + len(ids)]
        done += len(ids)
        if expected is None or not ids or Counter(expected) == Counter(ids):
            continue
        twice = [
            one
            for one, count in Counter(ids).items()
            if count > 1 and Counter(expected)[one] <= 1
        ]
        if twice:
            places = sorted(
                {place for (_, place), values in found.items() if twice[0] in values}
            )
            where = (
                f"ranks {', '.join(map(str, places))}"
                if len(places) > 1
                else f"rank {places[0]}"
            )
            text = f"read {Counter(ids)[twice[0]]} times in this step, by {where}"
            more = f", and {len(twice) - 1} other samples" if len(twice) > 1 else ""
            hint = "the sampler does not divide the data among the ranks, or repeats samples"
            return Finding(
                kind="samples",
                step=step,
                where=f"sample {twice[0]}",
                text=text + more,
                hint=hint,
            )
        other = next(iter((Counter(ids) - Counter(expected)).elements()), None)
        return Finding(
            kind="samples",
            step=step,
            where="" if other is None else f"sample {other}",
            text="a single process does not read it in this step",
            hint="the order of the data depends on the number of ranks",
        )
    return None


def compare_samples(run: Sequence[Record], exact: Record) -> Finding | None:
    """Compare the tensors of each batch with those that the plain loop reads."""
    found = [(at, record.place, record) for record in run for at in record.micros]
    for (step, index), place, record in sorted(found, key=lambda each: each[:2]):
        micro = record.micros[step, index]
        pair = exact.micros.get((step, index * record.places + place))
        if pair is None or pair.ids != micro.ids or len(pair.batch) != len(micro.batch):
            continue
        for mine, other in zip(micro.batch, pair.batch, strict=True):
            if mine.shape != other.shape or same_bits(mine, other.to(mine.dtype)):
                continue
            rows = range(len(mine)) if mine.ndim else ()
            row = next(
                (i for i in rows if not same_bits(mine[i], other[i].to(mine.dtype))), 0
            )
            ids = (
                micro.ids
                if micro.ids is not None and len(rows) == len(micro.ids)
                else None
            )
            if any(
                each.changed
                for each in (*record.micros.values(), *exact.micros.values())
            ):
                return Finding(
                    kind="data",
                    step=step,
                    where=f"batch {index}" if ids is None else f"sample {ids[row]}",
                    text="has other contents than in one process: training_step changes its batch in place",
                    hint="change a copy: x = x + 1 or x.clone(), not x.add_(1); the data set holds the changed values",
                )
            return Finding(
                kind="data",
                step=step,
                where=f"batch {index}" if ids is None else f"sample {ids[row]}",
                text=f"has different contents on rank {place} than in one process",
                hint="the dataset, an augmentation or collate_fn keeps state between samples",
            )
    return None
