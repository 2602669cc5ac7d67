"""A stand-in: the part of Comet that the logger calls, with its signatures; calls are recorded."""

import uuid

from recording import content, record


class ExperimentConfig:
    def __init__(
        self, disabled=None, log_code=None, offline_directory=None, name=None, tags=None
    ):
        self.given = {
            "name": name,
            "tags": tags,
            "offline_directory": offline_directory,
        }


def start(api_key=None, workspace=None, project=None, project_name=None, experiment_key=None, mode=None, online=None,
          source=None, experiment_config=None):  # fmt: skip
    assert online is False
    return CometExperiment(
        experiment_key or uuid.uuid4().hex,
        project_name or project,
        experiment_config.given,
    )


class CometExperiment:
    def __init__(self, key, project, config):
        self._key = key
        record("begin", run=key, project=project, name=config["name"])

    def get_key(self):
        return self._key

    def end(self):
        record("end", run=self._key)

    def flush(self):
        return True

    def log_other(self, key, value):
        record("other", run=self._key, name=key, value=value)

    def log_metrics(
        self, dic, prefix=None, step=None, epoch=None, include_context=True
    ):
        for name, value in dic.items():
            record("metric", run=self._key, name=name, value=value, step=step)

    def log_parameters(self, parameters, prefix=None, step=None, nested_support=True):
        assert nested_support
        record("params", run=self._key, params=parameters)

    def log_asset(
        self,
        file_data,
        file_name=None,
        overwrite=False,
        copy_to_tmp=True,
        step=None,
        metadata=None,
    ):
        record("file", run=self._key, name=file_name, content=content(file_data))

    def log_image(self, image_data, name=None, overwrite=False, image_format="png", image_scale=1.0, image_shape=None,
                  image_colormap=None, image_minmax=None, image_channels="last", copy_to_tmp=True, step=None,
                  annotations=None, metadata=None):  # fmt: skip
        record(
            "image",
            run=self._key,
            name=name,
            step=step,
            size=image_data.size,
            caption=(metadata or {}).get("caption"),
        )

    def log_text(self, text, step=None, metadata=None):
        record("text", run=self._key, name=metadata["key"], text=text, step=step)

    def log_histogram_3d(
        self, values, name=None, step=None, epoch=None, metadata=None, **kwargs
    ):
        record("histogram", run=self._key, name=name, values=list(values), step=step)
