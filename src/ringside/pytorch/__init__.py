"""PyTorch: `attach()` synchronises and watches a DistributedDataParallel model."""

from ringside.pytorch.ddp.attach import attach
from ringside.pytorch.ddp.attached_model import Attachment, attachment_of
from ringside.pytorch.group_watch import Watch, watch, watch_unasked
from ringside.pytorch.process_group.carrier import carried
from ringside.pytorch.recording.session import Session, has_session, log_step

__all__ = [
    "Attachment",
    "Session",
    "Watch",
    "attach",
    "attachment_of",
    "carried",
    "has_session",
    "log_step",
    "watch",
    "watch_unasked",
]
