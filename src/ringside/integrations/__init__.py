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
