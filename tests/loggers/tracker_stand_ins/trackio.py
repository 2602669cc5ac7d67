"""A stand-in: the part of Trackio that the logger calls, with its signatures; calls are recorded."""

import itertools
import re

from recording import content, record


class Image:
    def __init__(self, value, caption=None):
        self.event = {"kind": "image", "size": value.size, "caption": caption}


class Markdown:
    def __init__(self, text=""):
        self.event = {"kind": "text", "text": text}


class Histogram:
    def __init__(self, sequence=None, np_histogram=None, num_bins=64):
        self.event = {"kind": "histogram", "values": list(sequence)}


class Table:
    def __init__(self, columns=None, data=None, dataframe=None, rows=None, optional=True, allow_mixed_types=False,
                 log_mode="IMMUTABLE"):  # fmt: skip
        self.event = {"kind": "table", "rows": [columns, *data]}


_numbers = itertools.count()


class Run:
    def __init__(self, name, config):
        self.name, self.config, self._logged = name, config, False

    def log(self, metrics, step=None):
        if not self._logged:  # as Trackio has it
            record("params", run=self.name, params=self.config)
            self._logged = True
        for name, value in metrics.items():
            event = (
                {"kind": "metric", "value": value}
                if isinstance(value, (int, float))
                else value.event
            )
            record(**event, run=self.name, name=name, step=step)

    def log_artifact(
        self, artifact_or_path, name=None, type=None, aliases=None, overwrite=False
    ):
        assert re.fullmatch(r"[A-Za-z0-9._-]+", name)
        record("file", run=self.name, name=name, content=content(artifact_or_path))

    def finish(self):
        record("end", run=self.name)


def init(project, name=None, group=None, space_id=None, server_url=None, dataset_id=None, bucket_id=None, config=None,
         resume="never", settings=None, private=None, embed=True, auto_log_gpu=None, gpu_log_interval=10.0,
         auto_log_cpu=None, cpu_log_interval=10.0, webhook_url=None, webhook_min_level=None):  # fmt: skip
    assert resume in ("never", "allow")
    name = name or f"made-up-{next(_numbers)}"
    record("begin", run=name, project=project, name=name)
    return Run(name, config)
