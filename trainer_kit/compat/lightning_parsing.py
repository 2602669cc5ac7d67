"""Lightning's ``utilities.parsing``: the arguments of constructors, read from their frames."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import MutableMapping
from types import FrameType

from lightning_utilities.core.rank_zero import rank_zero_warn

from trainer_kit.core.types import Keywords

__all__ = [
    "clean_namespace",
    "collect_init_args",
    "get_init_args",
    "is_picklable",
    "parse_class_init_keys",
]


def parse_class_init_keys(cls: type) -> tuple[str, str | None, str | None]:
    """The names of ``self``, ``*args`` and ``**kwargs`` in a constructor; None for one that it lacks.

    Example:
        >>> class Model:
        ...     def __init__(self, width, *rest, depth=2, **options): ...
        >>> parse_class_init_keys(Model)
        ('self', 'rest', 'options')
    """
    # A checker warns of __init__ of an object, whose class may have another one; `cls` is the class itself.
    parameters = list(inspect.signature(cls.__init__).parameters.values())  # type: ignore[misc]
    names = {parameter.kind: parameter.name for parameter in parameters}
    first = parameters[0].name
    return (
        first,
        names.get(inspect.Parameter.VAR_POSITIONAL),
        names.get(inspect.Parameter.VAR_KEYWORD),
    )


def get_init_args(frame: FrameType) -> Keywords:
    """The arguments of the constructor that runs in a frame; empty for any other frame.

    Args:
        frame: of an ``__init__`` that mentions ``super()`` or ``__class__``, such as ``inspect.currentframe()`` there.

    Example:
        >>> class Model:
        ...     def __init__(self, width, **options):
        ...         super().__init__()
        ...         self.arguments = get_init_args(inspect.currentframe())
        >>> Model(3, depth=2).arguments
        {'width': 3, 'depth': 2}
    """
    return _arguments(frame)[1]


def collect_init_args(
    frame: FrameType,
    path_args: list[Keywords],
    inside: bool = False,
    classes: tuple[type, ...] = (),
) -> list[Keywords]:
    """The arguments of every constructor in the chain that runs in a frame and its callers.

    Args:
        frame: of the innermost constructor.
        path_args: the list to extend, one dict for each constructor; that of the most derived class is last.
        inside: whether the frame is inside the chain.
        classes: only constructors of instances of these classes.
    """
    current: FrameType | None = frame
    while current is not None and current.f_back is not None:
        owner, arguments = _arguments(current)
        if "__class__" in current.f_locals and (
            not classes or isinstance(owner, classes)
        ):
            # Innermost first: the constructor of the base class runs last and is met first.
            path_args.append(arguments)
            inside = True
        # The first frame that is no constructor ends the chain: one further out belongs to another object.
        elif inside:
            break
        current = current.f_back
    return path_args


def is_picklable(obj: object) -> bool:
    """Whether an object can be pickled.

    Example:
        >>> is_picklable([1]), is_picklable(lambda: 1)
        (True, False)
    """
    try:
        pickle.dumps(obj)
    # Not only PickleError: a local class may raise AttributeError, a lock TypeError, deep nesting RecursionError.
    except (pickle.PickleError, AttributeError, RuntimeError, TypeError):
        return False
    return True


def clean_namespace(hparams: MutableMapping[str, object]) -> None:
    """Remove the entries that cannot be pickled, with a warning for each."""
    # A list: the loop deletes from the dict that it reads.
    for name in [name for name, value in hparams.items() if not is_picklable(value)]:
        rank_zero_warn(
            f"{name!r} is removed from hparams: it cannot be pickled", stacklevel=5
        )
        del hparams[name]


def _arguments(frame: FrameType) -> tuple[object, Keywords]:
    # Python puts __class__ into the frame of a method that mentions super() or __class__.
    values = frame.f_locals
    if "__class__" not in values or frame.f_code.co_name != "__init__":
        return None, {}
    cls = values["__class__"]
    self_name, args_name, kwargs_name = parse_class_init_keys(cls)
    parameters = inspect.signature(cls.__init__).parameters
    skipped = (self_name, args_name, kwargs_name)
    arguments = {name: values[name] for name in parameters if name not in skipped}
    # Entries of **kwargs are arguments by name, as the caller has written them; those of *args have no names.
    if kwargs_name is not None:
        arguments.update(values[kwargs_name])
    return values[self_name], arguments
