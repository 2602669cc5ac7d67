"""A PyTorch trainer: structure where you want it, your own loop where you do not."""
