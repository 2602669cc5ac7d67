"""Find the worker process for which the main thread waits in a data loader, and the index that it reads."""

from __future__ import annotations

from types import FrameType
from typing import Any

from trainer_kit.data.workers import EndsWithParent

__all__ = ["waiting_for"]


def waiting_for(frame: FrameType | None) -> str:
    """Describe the worker for which a thread waits; "" if it waits for none."""
    while frame is not None:
        loader: Any = frame.f_locals.get("self")
        if type(loader).__name__ == "_MultiProcessingDataLoaderIter" and frame.f_code.co_name == "_try_get_data":
            worker = loader._task_info.get(loader._rcvd_idx, (None,))[0]
            if worker is None:
                return ""
            begins = loader._worker_init_fn
            index = begins.reading(worker) if isinstance(begins, EndsWithParent) else ""
            return f"worker {worker} (pid {loader._workers[worker].pid}) of the data loader{index}"
        frame = frame.f_back
    return ""
