"""One line in the frameworks that make the DistributedDataParallel model themselves.

| framework | the line |
|---|---|
| Accelerate | `model, optimizer = ringside.integrations.accelerate.attach(accelerator.prepare(model, optimizer))` |
| Hugging Face Trainer | `trainer.add_callback(ringside.integrations.transformers.RingsideCallback())` |
| Lightning | none (an entry point), or `Trainer(callbacks=[ringside.integrations.lightning.RingsideCallback()])` |

Nothing here is imported before it is used, and no framework is needed but one's own.
"""
