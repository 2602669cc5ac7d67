"""SwanLab."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, final

from trainer_kit.loggers.media import centers, histogram
from trainer_kit.loggers.run_logger import RunLogger

__all__ = ["SwanLabLogger"]


@final
class SwanLabLogger(RunLogger):
    """Log to SwanLab, or to files for ``swanlab sync`` with ``mode="offline"``.

    A process has one run, which stays open between ``fit``, ``validate`` and ``test``; SwanLab ends it with the
    process. Only ``mode="online"`` continues a run in another process: other modes begin a new run, whose
    hyperparameter ``continues`` names the first.

    Args:
        project: None for ``trainer_kit_logs``.
        workspace: None for the user's own.
        experiment_name: the name of the run; None lets SwanLab choose one.
        log_dir: where SwanLab keeps its files; None for ``save_dir/swanlog``.
        mode: ``"online"``, ``"local"``, ``"offline"`` or ``"disabled"``; None for SwanLab's setting.
        save_dir: where local files go.
        id: the id of a run to continue.
        prefix: the start of metric names, followed by ``-``.
        log_model: upload checkpoints: ``"all"`` when they are saved, True those that still exist at the end.
        run: a SwanLab run to log to; the caller finishes it.
        **kwargs: for ``swanlab.init``: ``description``, ``tags``, ``group``, ``job_type``, ``public``, ….

    Raises:
        ConfigurationError: swanlab is not installed.
    """

    requires, module, extra = "swanlab>=0.8", "swanlab", "swanlab"
    stays_open = True

    def __init__(
        self,
        project: str | None = None,
        workspace: str | None = None,
        experiment_name: str | None = None,
        log_dir: str | None = None,
        mode: Literal["online", "local", "offline", "disabled"] | None = None,
        save_dir: str | os.PathLike[str] = ".",
        id: str | None = None,
        prefix: str = "",
        log_model: Literal["all"] | bool = False,
        run: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            name=project,
            save_dir=save_dir,
            id=id if run is None else run.id,
            prefix=prefix,
            log_model=log_model,
            run=run,
        )
        arguments = {
            "workspace": workspace,
            "name": experiment_name,
            "mode": mode,
        }
        self._init = {
            name: value for name, value in arguments.items() if value is not None
        } | kwargs
        self._directory = (
            os.path.join(self._save_dir, "swanlog")
            if log_dir is None
            else os.path.expanduser(log_dir)
        )

    def _begin(self, id: str | None) -> tuple[Any, str]:
        import swanlab

        Path(self._directory).mkdir(parents=True, exist_ok=True)
        resumed = (
            {"id": id, "resume": "allow"}
            if id is not None and self._init.get("mode", "online") == "online"
            else {}
        )
        run = swanlab.init(
            project=self._name, log_dir=self._directory, **{**self._init, **resumed}
        )
        if id is not None and not resumed:
            run.config.update({"continues": id})
        return run, str(run.id)

    def _end(self, run: Any, status: str) -> None:
        if status == "success":
            run.finish()
        else:
            run.finish(
                state="aborted" if status == "interrupted" else "crashed", error=status
            )

    def _write_metrics(self, run: Any, values: Mapping[str, float], step: int) -> None:
        run.log(dict(values), step=step)

    def _write_params(self, run: Any, params: Mapping[str, Any]) -> None:
        run.config.update(dict(params))

    def _write_file(self, run: Any, path: Path, name: str) -> None:
        super()._write_file(run, path, name)
        root = Path(self._save_dir) / self._name / str(self._id)
        copy_path = root / name
        run.save(
            str(copy_path / "**" if copy_path.is_dir() else copy_path),
            base_path=str(root),
            policy="now",
        )

    def _write_image(
        self, run: Any, key: str, image: Any, step: int, index: int, caption: str | None
    ) -> None:
        run.log_image(
            key=f"{key}/{index}" if index else key,
            data=image,
            caption=caption,
            step=step,
        )

    def _write_text(self, run: Any, key: str, text: str, step: int) -> None:
        run.log_text(key=key, data=text, step=step)

    def _write_histogram(
        self, run: Any, key: str, values: Any, bins: int, step: int
    ) -> None:
        import swanlab

        counts, edges = histogram(values, bins)
        bars = swanlab.echarts.Bar()
        bars.add_xaxis(centers(edges))
        bars.add_yaxis(key, counts)
        run.log_echarts(key=key, data=bars, step=step)

    def _write_table(
        self, run: Any, key: str, columns: list[str], rows: list[list[Any]], step: int
    ) -> None:
        import swanlab

        table = swanlab.echarts.Table()
        table.add(columns, rows)
        run.log_echarts(key=key, data=table, step=step)
