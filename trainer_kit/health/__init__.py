"""The health of the machines and ranks of a run: checks of each machine, measured speeds, and how ranks differ."""
