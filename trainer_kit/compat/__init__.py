"""Names of Accelerate and Lightning: option records and aliases, used by the two faces alone."""
