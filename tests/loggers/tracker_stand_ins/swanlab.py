"""A stand-in: the part of SwanLab that the logger calls, with its signatures; calls are recorded."""

import uuid
from types import SimpleNamespace

from recording import content, record


class _Bar:
    def add_xaxis(self, xaxis_data):
        return self

    def add_yaxis(self, series_name, y_axis):
        self.event = {"kind": "histogram", "counts": y_axis}
        return self


class _Table:
    def add(self, headers, rows, attributes=None):
        self.event = {"kind": "table", "rows": [headers, *rows]}
        return self


echarts = SimpleNamespace(Bar=_Bar, Table=_Table)


class _Config(dict):
    def __init__(self, run):
        self.run = run

    def update(self, data):
        record("params", run=self.run, params=data)


class Run:
    def __init__(self, id):
        self.id, self.config = id, _Config(id)

    def log(self, data, step=None):
        for name, value in data.items():
            record("metric", run=self.id, name=name, value=value, step=step)

    def log_text(self, *, key, data, caption=None, step=None):
        record("text", run=self.id, name=key, text=data, step=step)

    def log_image(
        self,
        *,
        key,
        data,
        mode=None,
        caption=None,
        file_type=None,
        size=None,
        step=None,
    ):
        record(
            "image", run=self.id, name=key, size=data.size, caption=caption, step=step
        )

    def log_echarts(self, *, key, data, caption=None, step=None):
        record(**data.event, run=self.id, name=key, step=step)

    def save(self, glob_str, base_path=None, policy="live"):
        import glob
        import os

        for file in glob.glob(glob_str, recursive=True):
            if os.path.isfile(file):
                record(
                    "file",
                    run=self.id,
                    name=os.path.relpath(file, base_path),
                    content=content(file),
                )

    def finish(self, state="success", error=None, async_log_timeout=None):
        record(
            "other",
            run=self.id,
            name="status",
            value={"crashed": "failed", "aborted": "interrupted"}.get(state, state),
        )
        record("end", run=self.id)


def init(*, reinit=None, log_dir=None, mode=None, workspace=None, project=None, public=None, name=None, color=None,
         description=None, job_type=None, group=None, tags=None, id=None, resume=None, parallel=None, config=None,
         settings=None, callbacks=None, **kwargs):  # fmt: skip
    run = Run(id or uuid.uuid4().hex[:8])
    record("begin", run=run.id, project=project, name=name)
    return run
