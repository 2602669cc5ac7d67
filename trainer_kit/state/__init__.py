"""The state of a run: collected, saved, restored, and the record of runs."""
