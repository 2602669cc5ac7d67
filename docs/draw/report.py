"""Writes docs/pictures/report-light.png and report-dark.png: the report of a real run, for ``make pictures``.

It needs a Chromium (``CHROMIUM`` names one) and trains ``examples/digits.py`` for some seconds.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / "docs" / "pictures"
WIDTH, HEIGHT, COLORS = 1200, 860, 128


def train(root: str) -> Path:
    """The report of a run of the digits."""
    ran = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples" / "digits.py"),
            "--root",
            root,
            "--accelerator",
            "cpu",
            "--devices",
            "1",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    (logs,) = re.findall(r"--logdir (.+)", ran.stdout)
    return Path(logs) / "report.html"


BROWSER = (
    os.environ.get("CHROMIUM")
    or shutil.which("chromium")
    or shutil.which("google-chrome")
)


def photograph(report: Path) -> None:
    """The first screen of the page, in both color schemes, with few colors to keep the files small."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        for scheme in ("light", "dark"):
            page = browser.new_context(
                viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme
            ).new_page()
            page.goto(report.resolve().as_uri())
            page.wait_for_function("document.documentElement.dataset.drawn")
            target = PICTURES / f"report-{scheme}.png"
            page.screenshot(path=target)
            few = (
                Image.open(target)
                .convert("RGB")
                .quantize(COLORS, dither=Image.Dither.NONE)
            )
            few.save(target, optimize=True)
            print(
                f"wrote {target.relative_to(ROOT)}: {target.stat().st_size // 1000} kB"
            )
        browser.close()


def main() -> None:
    if BROWSER is None:
        print(
            "no Chromium on this machine (CHROMIUM names one): the pictures of the report stay as they are"
        )
        return
    with TemporaryDirectory() as root:
        photograph(train(root))


if __name__ == "__main__":
    main()
