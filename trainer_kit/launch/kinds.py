"""Which kind of run the options ask for: some choose devices, others the engine that holds the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from trainer_kit.core.configuration_sources import Chosen
from trainer_kit.core.errors import ConfigurationError
from trainer_kit.launch.options import ENGINE_WORDS

__all__ = ["with_kind"]

_DEVICES: Final = ("cpu", "multi_gpu", "tpu")
_ENGINES: Final = (*(kind for kind in ENGINE_WORDS.values() if kind is not None), "TP")


def with_kind(*levels: Mapping[str, Chosen]) -> dict[str, Chosen]:
    """All options, with the ``distributed_type`` and ``use_cpu`` that they amount to.

    Devices and engine are two choices: ``--cpu`` leaves the engine of a file as it is, ``--use_fsdp`` its devices.

    Args:
        levels: each counts before those to its left; the first has both options. ``cpu`` may be among them.

    Raises:
        ConfigurationError: two engines, or two kinds of devices, at one level.

    Example:
        >>> defaults = {"distributed_type": Chosen(None, "default"), "use_cpu": Chosen(False, "default")}
        >>> file, flags = {"use_fsdp": Chosen(True, "a.yaml:1")}, {"cpu": Chosen(True, "flag --cpu")}
        >>> found = with_kind(defaults, file, flags)
        >>> found["distributed_type"].value, found["use_cpu"].value
        ('FSDP', True)
    """
    chosen: dict[str, Chosen] = {}
    for level in levels:
        chosen = {**chosen, **level}
        chosen.update(_amount_to(level, chosen))
    chosen.pop("cpu", None)
    return chosen


def _amount_to(level: Mapping[str, Chosen], chosen: Mapping[str, Chosen]) -> dict[str, Chosen]:
    """``distributed_type`` and ``use_cpu`` by the words of one level, else as chosen so far."""
    devices, engines = ([word for word in words if _is_on(level, word)] for words in (_DEVICES, ENGINE_WORDS))
    given, on_cpu = chosen["distributed_type"], chosen["use_cpu"]
    kind = given
    _only_one(level, devices)
    _only_one(level, engines)
    if "tpu" in devices:
        _only_one(level, [*devices, *engines])
    if devices:
        on_cpu = Chosen(devices[0] == "cpu", level[devices[0]].origin)
    if engines:
        engine, origin = ENGINE_WORDS[engines[0]], level[engines[0]].origin
        if "distributed_type" in level and given.value in _ENGINES and given.value != engine:
            _only_one(level, ["distributed_type", engines[0]])
        if engine is not None or not _on_several(given):
            kind = Chosen(engine, origin)
    if "tpu" in devices:
        kind = Chosen("XLA", level["tpu"].origin)
    elif "cpu" in devices and kind.value not in _ENGINES:
        kind = Chosen("MULTI_CPU", level["cpu"].origin)
    elif (
        "multi_gpu" in devices and kind.value not in _ENGINES and not (_on_several(kind) and kind.value != "MULTI_CPU")
    ):
        kind = Chosen("MULTI_GPU", level["multi_gpu"].origin)
    return {"distributed_type": kind, "use_cpu": on_cpu}


def _is_on(level: Mapping[str, Chosen], word: str) -> bool:
    return word in level and bool(level[word].value)


def _on_several(kind: Chosen) -> bool:
    return str(kind.value).startswith("MULTI_")


def _only_one(level: Mapping[str, Chosen], words: Iterable[str]) -> None:
    several = list(words)
    if len(several) > 1:
        raise ConfigurationError(
            "one kind of run at a time",
            found=", ".join(f"{word}={level[word].value} ({level[word].origin})" for word in several),
        )
