"""Encoded trees, looked into and joined without decoding them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer_kit.checkpoint.codec import TAG, decode
from trainer_kit.core.errors import CheckpointError

__all__ = ["children", "merge", "tensor_record"]


def children(tree: Any, *, at: str = "", file: object = "state.json") -> Mapping[Any, Any] | list[Any] | None:
    """The trees of a dict's values by key, or of a list's or tuple's items; None for a tree of anything else.

    Example:
        >>> from trainer_kit.checkpoint.codec import encode
        >>> children(encode({"a": {1: "one"}}, {}))
        {'a': {'$': 'dict', 'v': [[1, 'one']]}}
        >>> children(children(encode({"a": {1: "one"}}, {}))["a"])
        {1: 'one'}
    """
    if isinstance(tree, list):
        return tree
    if not isinstance(tree, dict):
        return None
    if TAG not in tree:
        return tree
    tag, value = tree[TAG], tree.get("v")
    if tag in ("OrderedDict", "Counter"):
        return children(value, at=at, file=file)
    if tag == "tuple" and isinstance(value, list):
        return value
    if tag != "dict" or not isinstance(value, list):
        return None
    try:
        return {decode(key, {}, at=at, file=file): item for key, item in value}
    except (TypeError, ValueError) as error:
        raise CheckpointError(file, at or None, f"damaged record of a dict: {error}") from error


def tensor_record(tree: Any) -> Mapping[str, Any] | None:
    """The record of a tensor, when this tree is one; its name stands under ``"v"``."""
    return tree if isinstance(tree, dict) and tree.get(TAG) == "tensor" else None


def merge(first: Any, second: Any) -> Any:
    """Both trees in one: what either dict has, at any depth; where they differ otherwise, the first.

    Ranks that hold different parts of a model, such as the stages of a pipeline, make one state this way.

    Example:
        >>> merge({"model": {"a": 1}, "step": 3}, {"model": {"b": 2}, "step": 4})
        {'model': {'a': 1, 'b': 2}, 'step': 3}
    """
    if first == second:
        return first
    if isinstance(first, dict) and isinstance(second, dict):
        if TAG not in first and TAG not in second:
            joined = {key: merge(value, second[key]) if key in second else value for key, value in first.items()}
            return {**joined, **{key: value for key, value in second.items() if key not in first}}
        if first.get(TAG) == second.get(TAG) == "OrderedDict":
            return {**first, "v": merge(first["v"], second["v"])}
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [merge(one, other) for one, other in zip(first, second, strict=True)]
    return first
