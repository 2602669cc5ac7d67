"""Writes docs/assets/loop.svg, the loop with every hook at its place, for ``make docs``.

`tests/training/test_hook_order.py` compares `FIT` and `EVALUATION` with the order of a real fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, Final

from trainer_kit.core.hooks import Callback

PAGE = Path(__file__).parent / "assets" / "loop.svg"

MOVED: Final = [
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
]
# A name is a hook or a method that a user may define, a pair a box with its title, a text with a space a remark.
FIT: Final[list[Any]] = [
    (
        "set-up",
        [
            "configure_callbacks",
            "prepare_data",
            "setup",
            "configure_model",
            "train_dataloader",
            "configure_optimizers",
            "val_dataloader",
            "on_load_checkpoint",
            "load_state_dict",
            "on_fit_start",
        ],
    ),
    ("sanity check", ["on_sanity_check_start", "→ evaluation", "on_sanity_check_end"]),
    "on_train_start",
    (
        "each epoch",
        [
            "on_train_epoch_start",
            (
                "each optimizer step",
                [
                    (
                        "each micro-batch",
                        [
                            *MOVED,
                            "on_train_batch_start",
                            "training_step",
                            "on_before_zero_grad",
                            "optimizer_zero_grad",
                            "↑ first of the step only",
                            "on_before_backward",
                            "backward",
                            "on_after_backward",
                            "on_train_batch_end",
                            "↑ last of the step: after it",
                        ],
                    ),
                    "on_before_optimizer_step",
                    "configure_gradient_clipping",
                    "optimizer_step",
                    "lr_scheduler_step",
                    "on_train_step_end",
                ],
            ),
            (
                "where validation is due",
                ["on_validation_model_zero_grad", "→ evaluation"],
            ),
            "on_train_epoch_end",
            (
                "where a checkpoint is due",
                ["state_dict", "on_save_checkpoint", "on_checkpoint_committed"],
            ),
        ],
    ),
    "on_train_end",
    "on_fit_end",
    "teardown",
]
EVALUATION: Final[list[Any]] = [
    "on_validation_model_eval",
    "on_validation_start",
    "on_validation_epoch_start",
    (
        "each batch",
        [
            *MOVED,
            "on_validation_batch_start",
            "validation_step",
            "on_validation_batch_end",
        ],
    ),
    "on_validation_epoch_end",
    "on_validation_end",
    "on_validation_model_train",
]
OTHERS: Final = [
    ("fit", FIT),
    ("evaluation: validation; likewise test and predict", EVALUATION),
    ("validate, test, predict", ["configure_callbacks", "prepare_data", "setup", "configure_model",
                                 "…_dataloader", "→ evaluation", "teardown"]),
    ("at an exception, at any time", ["on_exception", "teardown"]),
]  # fmt: skip
LINE, PAD, WIDTH = 19, 10, 400
STYLE = """
text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#1b1f24}
.t{font:600 12.5px system-ui,sans-serif;fill:#3949ab}
.r{font:italic 12px system-ui,sans-serif;fill:#57606a}
.m{fill:#0b6e4f}
rect{fill:#3f51b5;fill-opacity:.055;stroke:#3f51b5;stroke-opacity:.35}
.back{fill:#fff;fill-opacity:1;stroke:none}
@media (prefers-color-scheme:dark){text{fill:#e6e8ee}.t{fill:#9fa8ff}.r{fill:#a5adbb}.m{fill:#5fd0a5}
rect{fill:#8c9eff;fill-opacity:.07;stroke:#8c9eff}.back{fill:#14161f;fill-opacity:1}}
"""


def names(parts: list[Any]) -> Iterator[str]:
    """The hooks of a column from top to bottom."""
    for part in parts:
        if isinstance(part, tuple):
            yield from names(part[1])
        elif " " not in part and "…" not in part:
            yield part


def _height(part: Any) -> int:
    return (
        PAD + LINE + 4 + sum(_height(each) + 3 for each in part[1])
        if isinstance(part, tuple)
        else LINE
    )


def _draw(part: Any, x: int, y: int, width: int) -> Iterator[str]:
    if not isinstance(part, tuple):
        kind = "r" if " " in part else "h" if part in vars(Callback) else "m"
        yield f'<text class="{kind}" x="{x}" y="{y + 14}">{escape(part)}</text>'
        return
    title, inner = part
    yield f'<rect x="{x}" y="{y}" width="{width}" height="{_height(part)}" rx="8"/>'
    yield f'<text class="t" x="{x + PAD}" y="{y + PAD + 10}">{escape(title)}</text>'
    below = y + PAD + LINE
    for each in inner:
        yield from _draw(each, x + PAD, below, width - 2 * PAD)
        below += _height(each) + 3


def render() -> str:
    """The whole picture."""
    drawn, below = list(_draw(OTHERS[0], PAD, PAD, WIDTH)), PAD
    for column in OTHERS[1:]:
        drawn += _draw(column, WIDTH + 3 * PAD, below, WIDTH)
        below += _height(column) + 2 * PAD
    notes = [
        "dark: a hook of callbacks, nearly all of modules too",
        "green: a method of the module, or of its data, alone",
    ]
    drawn += [
        f'<text class="r" x="{WIDTH + 3 * PAD}" y="{below + 14 + LINE * n}">{note}</text>'
        for n, note in enumerate(notes)
    ]
    width, height = 2 * WIDTH + 4 * PAD, _height(OTHERS[0]) + 2 * PAD
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
            ' aria-label="The loop, with every hook at its place">',
            f"<style>{STYLE}</style>",
            f'<rect class="back" width="{width}" height="{height}"/>',
            *drawn,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
    print("wrote docs/assets/loop.svg")
