"""Passwords, keys and tokens are masked before configuration is shown or written anywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["MASK", "holds_secret", "mask_secrets"]

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
