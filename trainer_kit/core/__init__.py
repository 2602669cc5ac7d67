"""What every other room stands on: errors, the hook specification, progress, the module. Imports nothing of ours."""
