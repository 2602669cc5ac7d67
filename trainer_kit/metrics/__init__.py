"""What `self.log` does: entries, their reduction over batches and ranks, metric objects."""
