"""Run the guides that are named, one after the other."""

import runpy
import sys
from pathlib import Path

for name in sys.argv[1:]:
    runpy.run_path(str(Path(__file__).with_name(f"{name}.py")), run_name="__main__")
