import os
import subprocess
import sys
from pathlib import Path

import pytest

import trainer_kit.callbacks as callbacks
from trainer_kit.core.hooks import Callback


def test_every_name_is_a_callback():
    assert callbacks.__all__ == sorted(callbacks.__all__) == sorted(dir(callbacks))
    for name in callbacks.__all__:
        assert issubclass(getattr(callbacks, name), Callback)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = callbacks.Nothing


def test_importing_it_imports_no_callback_and_nothing_heavy():
    code = """if True:
        import sys, torch
        before = set(sys.modules)
        import trainer_kit.callbacks as room
        loaded = {name for name in sys.modules if name.startswith("trainer_kit.callbacks.")}
        assert not loaded, loaded
        for name in room.__all__:
            getattr(room, name)
        room.TQDMProgressBar(), room.ModelSummary(), room.ModelCheckpoint()
        heavy = {"tqdm", "torch.utils.flop_counter", "tensorboard", "trainer_kit.checkpoint"}
        heavy &= set(sys.modules) - before
        assert not heavy, heavy
    """
    root = str(Path(callbacks.__file__).parents[2])
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={**os.environ, "PYTHONPATH": root})
