"""A stand-in: the part of DVCLive that the logger calls, with its signatures; it writes the same files."""

import json
import shutil
from pathlib import Path

import yaml


class Live:
    def __init__(self, dir="dvclive", resume=False, report=None, save_dvc_exp=True, dvcyaml="dvc.yaml",
                 cache_images=False, exp_name=None, exp_message=None, monitor_system=False):  # fmt: skip
        self.dir, self.step, self.summary, self.params = dir, 0, {}, {}
        if not resume:
            shutil.rmtree(dir, ignore_errors=True)
        elif Path(dir, "params.yaml").exists():
            self.params = yaml.safe_load(Path(dir, "params.yaml").read_text())
        Path(dir).mkdir(parents=True, exist_ok=True)

    @property
    def artifacts_dir(self):
        return f"{self.dir}/artifacts"

    def log_metric(self, name, val, timestamp=False, plot=True):
        file = Path(self.dir, "plots", "metrics", f"{name}.tsv")
        file.parent.mkdir(parents=True, exist_ok=True)
        start = "" if file.exists() else f"step\t{file.stem}\n"
        with open(file, "a") as stream:
            stream.write(f"{start}{self.step}\t{val}\n")
        self.summary[name] = val

    def log_params(self, params):
        self.params.update(params)
        Path(self.dir, "params.yaml").write_text(yaml.safe_dump(self.params))

    def log_image(self, name, val):
        file = Path(self.dir, "plots", "images", name)
        file.parent.mkdir(parents=True, exist_ok=True)
        val.save(file)

    def make_summary(self):
        Path(self.dir, "metrics.json").write_text(json.dumps(self.summary))

    def sync(self):
        self.make_summary()

    def end(self):
        self.sync()
