"""The loops: fit, evaluate, predict, and what happens between two optimizer steps."""
