"""One optimizer step: callbacks, micro-batches, accumulation windows, optimizers, schedules; and evaluation."""
