"""What is done to a module so that several devices share it: one class and file each, ``apply(module, mesh)``."""
