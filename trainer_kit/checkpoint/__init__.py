"""Bytes on disk: a checkpoint is a directory of safetensors and JSON, complete or absent. No pickle."""
