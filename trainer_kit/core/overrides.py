"""Subclasses of shipped classes: what they override must be called, else the class is refused when it is created."""

from __future__ import annotations

from typing import Any, Final

from trainer_kit.core.errors import ConfigurationError

__all__ = ["check_overrides", "leave_out"]

_OURS: Final = "trainer_kit."
_HOOKS: Final = "override a hook (on_train_batch_end, on_validation_end, ...) or a public method instead"


def check_overrides(cls: type, root: type) -> None:
    """Refuse a subclass of a shipped class that overrides what is never called, or a private name of that class.

    ``never_called`` of the shipped class maps each name that is never called to what to do instead.

    Args:
        cls: the class that is being created.
        root: the base class that is there to be extended.

    Raises:
        ConfigurationError: naming the override and the way out.
    """
    shipped = [base for base in cls.__mro__[1:] if base.__module__.startswith(_OURS) and base is not root]
    shipped = [base for base in shipped if issubclass(base, root)]
    if cls.__module__.startswith(_OURS) or not shipped:
        return
    refused: dict[str, str] = {}
    for base in reversed([*shipped, root]):
        refused.update(vars(base).get("never_called", {}))
    for name in vars(cls):
        if name in refused:
            problem, found = "would never be called", "does not call it"
        elif name.startswith("_") and not name.startswith("__") and any(name in vars(base) for base in shipped):
            problem, found = "replaces a private name", "may change it"
        else:
            continue
        raise ConfigurationError(
            f"{cls.__name__}.{name} {problem}",
            found=f"a subclass of {shipped[0].__name__}, which {found}",
            fix=refused.get(name, _HOOKS),
        )


def leave_out(callback: Any, hook: str, owner: type) -> None:
    """Let the bus leave out a hook in which ``owner`` has nothing to do now; a subclass's override stays."""
    if getattr(type(callback), hook) is getattr(owner, hook):
        setattr(callback, hook, getattr(super(owner, callback), hook))
