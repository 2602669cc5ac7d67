"""A stand-in: the part of Aim that the logger calls, with its signatures; calls are recorded."""

import uuid

from recording import record


class Image:
    def __init__(self, image, caption="", format="png", quality=90, optimize=False):
        self.event = {"kind": "image", "size": image.size, "caption": caption}


class Text:
    def __init__(self, text):
        self.event = {"kind": "text", "text": text}


class Distribution:
    def __init__(self, samples=None, bin_count=64, *, hist=None, bin_range=None):
        self.event = {"kind": "histogram", "values": list(samples)}


class Run:
    def __init__(self, run_hash=None, *, repo=None, read_only=False, experiment=None, force_resume=False,
                 system_tracking_interval=None, log_system_params=False, capture_terminal_logs=True):  # fmt: skip
        self.hash = run_hash or uuid.uuid4().hex[:24]
        record("begin", run=self.hash, project=experiment, name=None)

    def set(self, key, val, strict=True):
        if key == "status":
            record("other", run=self.hash, name=key, value=val)
        else:
            assert key[0] == "hparams"
            record("params", run=self.hash, params={key[1]: val})

    def track(self, value, name=None, step=None, epoch=None, *, context=None):
        event = (
            {"kind": "metric", "value": value}
            if isinstance(value, (int, float))
            else value.event
        )
        subset = (context or {}).get("subset")
        record(
            **event,
            run=self.hash,
            name=f"{subset}_{name}" if subset else name,
            step=step,
        )

    def close(self):
        record("end", run=self.hash)
