"""The base of every other room: errors, the hook specification, progress, the module. Imports no other room."""

from trainer_kit.core.lazy import other_names

__all__: list[str] = []

__getattr__ = other_names(__name__)
