"""Names of Accelerate and Lightning: option records and aliases."""
