"""A stand-in: the part of ClearML that the logger calls, with its signatures; calls are recorded."""

import uuid

from recording import content, record


class Task:
    _offline = False

    @classmethod
    def set_offline(cls, offline_mode=False):
        cls._offline = offline_mode

    @classmethod
    def init(cls, project_name=None, task_name=None, task_type="training", tags=None, reuse_last_task_id=True,
             continue_last_task=False, output_uri=None, auto_connect_arg_parser=True, auto_connect_frameworks=True,
             auto_resource_monitoring=True, auto_connect_streams=True, deferred_init=False):  # fmt: skip
        assert not auto_connect_frameworks
        task = cls()
        task.id = (
            continue_last_task
            or f"{'offline-' if cls._offline else ''}{uuid.uuid4().hex}"
        )
        record("begin", run=task.id, project=project_name, name=task_name)
        return task

    def get_logger(self):
        return Logger(self)

    def update_parameters(self, *args, **kwargs):
        (params,) = args
        for name, value in params.items():
            record("params", run=self.id, params={name.removeprefix("General/"): value})

    def set_parameter(self, name, value, description=None, value_type=None):
        self.update_parameters({name: value})

    def upload_artifact(self, name, artifact_object, metadata=None, delete_after_upload=False, auto_pickle=None,
                        preview=None, wait_on_upload=False, extension_name=None,
                        retries=0, sort_keys=True):  # fmt: skip
        record("file", run=self.id, name=name, content=content(artifact_object))

    def flush(self, wait_for_uploads=False):
        return True

    def mark_failed(
        self, ignore_errors=True, status_reason=None, status_message=None, force=False
    ):
        record("other", run=self.id, name="status", value="failed")

    def mark_stopped(self, force=False, status_message=None):
        record("other", run=self.id, name="status", value="interrupted")

    def close(self):
        record("end", run=self.id)


class Logger:
    def __init__(self, task):
        self.task = task

    def report_scalar(self, title, series, value, iteration):
        name = series if title == series else f"{title}/{series}"
        record("metric", run=self.task.id, name=name, value=value, step=iteration)

    def report_text(self, msg, level=20, print_console=True, *args, **_):
        record("text", run=self.task.id, text=msg)

    def report_image(self, title, series, iteration=None, local_path=None, image=None, matrix=None,
                     max_image_history=None, delete_after_upload=False, url=None):  # fmt: skip
        record(
            "image",
            run=self.task.id,
            name=title,
            step=iteration,
            size=image.size,
            caption=series,
        )

    def report_histogram(self, title, series, values, iteration=None, labels=None, xlabels=None, xaxis=None, yaxis=None,
                         mode=None, data_args=None, extra_layout=None):  # fmt: skip
        record("histogram", run=self.task.id, name=title, counts=values, step=iteration)

    def report_table(self, title, series, iteration=None, table_plot=None, csv=None, url=None, extra_layout=None,
                     extra_data=None):  # fmt: skip
        record("table", run=self.task.id, name=title, rows=table_plot, step=iteration)
