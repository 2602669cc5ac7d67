"""A run on one process opens no connection and listens nowhere: SECURITY.md promises it."""

from __future__ import annotations

from tests.programs import Programs

SCRIPT = """
import socket
import sys
from pathlib import Path

import torch
import trainer_kit as tk
from trainer_kit.callbacks import ModelCheckpoint
from trainer_kit.testing import TinyModule

used = []
watched = ("socket.connect", "socket.sendto", "socket.bind", "socket.getaddrinfo", "urllib.Request")
sys.addaudithook(lambda event, words: used.append((event, words)) if event in watched else None)
batches = [torch.randn(8, 32)] * 4
trainer = tk.Trainer(max_epochs=2, callbacks=ModelCheckpoint(every_n_train_steps=1), log_every_n_steps=1)
trainer.fit(TinyModule(), batches, batches)
trainer.test(dataloaders=batches)
assert Path(trainer.log_dir, "report.html").is_file()
assert not used, used
try:
    socket.create_connection(("127.0.0.1", 9), timeout=1)
except OSError:
    pass
assert used, "the hook sees connections"
print("done")
"""


def test_a_run_opens_no_connection(programs: Programs) -> None:
    ran = programs.run_code(SCRIPT)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("done\n")
