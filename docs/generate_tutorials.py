"""Writes docs/tutorials/ from the scripts of the tutorials, for ``make docs``; a test holds that the pages are current.

A script is in the percent format that editors show as notebook cells: ``# %% [markdown]`` begins a cell of text in
comments, ``# %%`` one of code. Its docstring is the head of the page. So a page has no code of its own.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "tutorials"
TUTORIALS: dict[str, tuple[str, list[str]]] = {
    "digits": ("Image classification: handwritten digits", ["examples/digits.py"]),
    "transfer_learning": (
        "Transfer learning for images: fine-tune a pretrained network",
        ["examples/tutorials/transfer_learning.py"],
    ),
    "text_classifier": (
        "Text classification",
        ["examples/tutorials/text_classifier.py"],
    ),
    "time_series": ("Time series forecasting", ["examples/tutorials/time_series.py"]),
    "gan": ("GAN: two optimizers", ["examples/gan_named.py", "examples/gan_manual.py"]),
    "diffusion": ("Diffusion model", ["examples/tutorials/diffusion.py"]),
    "reinforce": (
        "Reinforcement learning: REINFORCE",
        ["examples/tutorials/reinforce.py"],
    ),
    "qlora": ("Fine-tuning with LoRA and QLoRA", ["examples/qlora.py"]),
    "lm": ("Train a language model with several strategies", ["examples/lm.py"]),
    "notebook_to_cluster": (
        "From a Jupyter notebook to a cluster",
        ["examples/tutorials/notebook_to_cluster.py"],
    ),
}
"""By page: its title, and the scripts that it is made of."""


def cells(source: str) -> list[tuple[bool, str]]:
    """The parts of a script in order: whether each is text, and its Markdown or its code."""
    first = ast.parse(source).body[0]
    lines = source.splitlines()
    found = [(True, (ast.get_docstring(ast.parse(source)) or "").replace("``", "`"))]
    code: list[str] = []
    text = False

    def end() -> None:
        body = (
            "\n".join(re.sub(r"^# ?", "", line) for line in code)
            if text
            else "\n".join(code)
        )
        if body.strip():
            found.append((text, body.strip("\n")))

    for line in lines[first.end_lineno :]:
        if re.match(r"# %%", line):
            end()
            code, text = [], "[markdown]" in line
        else:
            code.append(line)
    end()
    return found


def render(name: str) -> str:
    """One page."""
    title, scripts = TUTORIALS[name]
    parts = [
        f"# {title}",
        f"<!-- Written by docs/generate_tutorials.py from {', '.join(scripts)}; edit that, then `make docs`. -->",
    ]
    for script in scripts:
        for text, body in cells((ROOT / script).read_text(encoding="utf-8")):
            code = f"<!-- not run: a part of {script}, which the tests run -->\n```python\n{body}\n```"
            parts.append(body if text else code)
    parts.append(
        f"The whole script is {' and '.join(f'`{script}`' for script in scripts)} in the repository."
    )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    PAGES.mkdir(exist_ok=True)
    for name in TUTORIALS:
        (PAGES / f"{name}.md").write_text(render(name), encoding="utf-8")
    print(f"wrote {len(TUTORIALS)} pages to {PAGES.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
