"""Models larger than memory: built without weights, spread over devices, offloaded to the host or to disk."""
