"""One line in the frameworks that make the DistributedDataParallel model themselves.

| framework | the line |
|---|---|
| Accelerate | `model, optimizer = ringside.integrations.accelerate.attach(accelerator.prepare(model, optimizer))` |
| Hugging Face Trainer | `trainer.add_callback(ringside.integrations.transformers.RingsideCallback())` |
| Lightning | none (an entry point), or `Trainer(callbacks=[ringside.integrations.lightning.RingsideCallback()])` |
| Ray Train | `TorchTrainer(ringside.integrations.ray.watched(train), ...)` |
| PyTorch's debug server | `start_debug_server(handlers=ringside.integrations.debug_server.handlers())` |

Nothing here is imported before it is used, and no framework is needed but one's own.
"""

from __future__ import annotations

import importlib
from typing import Any

from ringside.errors import UsageError

# -------------------------------------------------------------------------------------------------
# The frameworks themselves: imported when they are needed, and one sentence where they are not installed.


def package(name: str) -> Any:
    """Return a framework's module.

    Args:
        name: The module, such as `lightning.pytorch`; its first part is what pip calls it.

    Raises:
        UsageError: It is not installed; the message has the pip command.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        framework = name.split(".")[0]
        if (error.name or "").split(".")[0] != framework:
            raise  # it is there, and lacks something of its own
        pip_name = framework.replace("_", "-")
        raise UsageError(
            f"{__name__}.{framework} needs {pip_name}, which is not installed: pip install {pip_name}"
        ) from None
