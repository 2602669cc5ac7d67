"""``python -m trainer_kit``."""

from trainer_kit.commands.main import main

if __name__ == "__main__":
    main(prog_name="trainer-kit")
