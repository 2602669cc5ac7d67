"""Finds a rank that hangs, reports which one and where, and ends the run with exit code 75."""
