"""The private name of torch that the names of other libraries use, checked with torch 2.13 and 2.14."""

from __future__ import annotations

from trainer_kit.core.torch_private import needs_private

__all__ = ["OptimizedModule"]

# The class of what ``torch.compile`` returns. Without it this module is not imported, and the names of Accelerate that
# ask for it say so.
with needs_private("is_compiled_module"):
    from torch._dynamo.eval_frame import OptimizedModule
