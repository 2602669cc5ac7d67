"""What a user reads: text of several lines, progress bars, numbers of bytes, and configuration without its secrets."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, final

__all__ = ["MASK", "Text", "bar_class", "holds_secret", "in_units", "mask_secrets"]


@final
class Text(str):
    """A string that an interactive session shows as its lines, and ``print`` prints once.

    Example:
        >>> Text("two\\nlines")
        two
        lines
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@cache
def bar_class() -> Any:
    """tqdm's, imported when the first bar is drawn, without what several processes would need.

    Example:
        >>> issubclass(bar_class(), __import__("tqdm").tqdm)
        True
    """
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg]
        # No thread that watches over slow bars, and no lock shared between processes: one rank draws.
        monitor_interval = 0
        _lock = threading.RLock()

    return Bar


MASK: Final = "***"
# Only strings are masked, so that max_tokens=128 stays; pad_token and the like are vocabulary, not secrets.
_KEY: Final = re.compile(
    r"(?:^|[_\-./])(?:password|passwd|secret|credentials?|(?:api|access|private|secret)[_\-]?key"
    r"|(?:api|access|auth|bearer|refresh|run|session|hf|github|wandb)[_\-]?token)(?:$|[_\-./])|^token$",
    re.IGNORECASE,
)
_USERINFO: Final = re.compile(r"(?P<scheme>[a-zA-Z][\w+.\-]*://)(?P<user>[^/\s:@]*):[^/\s@]+@")


def mask_secrets(value: Any, key: str = "") -> Any:
    """A copy of ``value`` without what looks like a secret; mappings, lists and tuples are looked into.

    Args:
        value: any value; only strings are ever masked.
        key: the name it goes by.

    Example:
        >>> mask_secrets({"lr": 0.1, "api_key": "abc", "store": "s3://me:pw@host/bucket", "pad_token": "<pad>"})
        {'lr': 0.1, 'api_key': '***', 'store': 's3://me:***@host/bucket', 'pad_token': '<pad>'}
    """
    if isinstance(value, str):
        return MASK if value and _KEY.search(key) else _USERINFO.sub(rf"\g<scheme>\g<user>:{MASK}@", value)
    if isinstance(value, Mapping):
        return {name: mask_secrets(item, str(name)) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(mask_secrets(item, key) for item in value)
    return value


def holds_secret(value: Any, key: str = "") -> bool:
    """Whether `mask_secrets` would change anything.

    Example:
        >>> holds_secret({"store": {"password": "x"}}), holds_secret({"max_tokens": 3})
        (True, False)
    """
    if isinstance(value, str):
        return bool(mask_secrets(value, key) != value)
    if isinstance(value, Mapping):
        return any(holds_secret(item, str(name)) for name, item in value.items())
    return type(value) in (list, tuple) and any(holds_secret(item, key) for item in value)


def in_units(size: float | None) -> str:
    """A number of bytes for people.

    Example:
        >>> in_units(3), in_units(4180), in_units(120_000_000), in_units(None)
        ('3 B', '4.18 kB', '120 MB', 'an unknown number')
    """
    if size is None:
        return "an unknown number"
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}"
