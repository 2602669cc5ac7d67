"""`trainer-kit` itself."""

from click.testing import CliRunner

import trainer_kit as tk
from trainer_kit.commands.main import main


def test_the_version():
    shown = CliRunner().invoke(main, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"trainer-kit, version {tk.__version__}\n")
    assert "--version" in CliRunner().invoke(main, ["--help"]).output
