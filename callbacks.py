"""Python imports this file only where `callbacks` is not a link: git writes links as text files on some systems."""

from trainer_kit.core.lazy import alias_package

alias_package(__name__, "trainer_kit.callbacks")
