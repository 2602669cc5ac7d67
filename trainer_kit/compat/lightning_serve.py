"""Lightning's ``ServableModule``: a module that answers requests, and a callback that tests it before training."""

from __future__ import annotations

import json
from typing import final

import torch
from torch import Tensor, nn

from trainer_kit.core.errors import ConfigurationError
from trainer_kit.core.hooks import Callback
from trainer_kit.core.protocols import ModuleLike, TrainerLike
from trainer_kit.core.tensors import move_to_device
from trainer_kit.core.types import Function, JsonObject

__all__ = ["ServableModule", "ServableModuleValidator"]


class ServableModule(nn.Module):
    """Mixin of a module that answers requests: ``class Mine(TrainModule, ServableModule)``."""

    def configure_payload(self) -> JsonObject:
        """An example of a request: ``{"body": {name: value}}``."""
        raise self._missing("configure_payload")

    def configure_serialization(
        self,
    ) -> tuple[dict[str, Function], dict[str, Function]]:
        """Functions by name that read the values of a request, and that write the values of a response."""
        raise self._missing("configure_serialization")

    def serve_step(self, *args: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
        """The response to a request, by name."""
        raise self._missing("serve_step")

    def configure_response(self) -> JsonObject | None:
        """The expected response to the example; None: any."""
        return None

    def _missing(self, name: str) -> ConfigurationError:
        return ConfigurationError(
            f"{type(self).__name__} is a ServableModule without {name}"
        )


@final
class ServableModuleValidator(Callback):
    """Send a module's example request through its serialization and ``serve_step`` before training.

    Request and response pass through JSON, as over a network; no server is started.

    Args:
        exit_on_failure: raise if the response differs; False keeps it in ``successful``.
        options: accepted: the server, host, port, optimization and timeout of Lightning's class.

    Attributes:
        resp: the response.
        successful: whether it is the expected one; None before a run.

    Raises:
        ConfigurationError: the module is not a `ServableModule`, or its response differs.
    """

    def __init__(
        self,
        optimization: str | None = None,
        exit_on_failure: bool = True,
        **options: object,
    ) -> None:
        unknown = options.keys() - {"server", "host", "port", "timeout"}
        if unknown:
            raise ConfigurationError(
                "unknown arguments", found=", ".join(sorted(unknown))
            )
        self.exit_on_failure = exit_on_failure
        self.resp: JsonObject | None = None
        self.successful: bool | None = None

    @torch.no_grad()
    def on_train_start(self, trainer: TrainerLike, pl_module: ModuleLike) -> None:
        if not isinstance(pl_module, ServableModule):
            raise ConfigurationError(
                "ServableModuleValidator needs a ServableModule",
                found=type(pl_module).__name__,
                fix="inherit from it too: class Mine(TrainModule, ServableModule)",
            )
        readers, writers = pl_module.configure_serialization()
        # What JSON cannot hold fails here as it would in a server.
        body = json.loads(json.dumps(pl_module.configure_payload()))["body"]
        inputs = _convert_values(readers, body)
        # Dropout and the statistics of normalization must not see the example.
        module: nn.Module = pl_module
        was_training = module.training
        module.eval()
        results = pl_module.serve_step(
            **move_to_device(inputs, trainer.strategy.device)
        )
        module.train(was_training)
        self.resp = json.loads(json.dumps(_convert_values(writers, results)))
        expected = pl_module.configure_response()
        self.successful = expected is None or self.resp == expected
        if self.exit_on_failure and not self.successful:
            raise ConfigurationError(
                "the module's response to its example request differs from the expected response",
                found=f"{self.resp}; configure_response returns {expected}",
                fix="correct serve_step or configure_response, or pass exit_on_failure=False",
            )


def _convert_values(functions: dict[str, Function], values: JsonObject) -> JsonObject:
    """Call the function of each value's name; values without one stay as they are."""
    converted = dict(values)
    for name in values.keys() & functions.keys():
        converted[name] = functions[name](values[name])
    return converted
