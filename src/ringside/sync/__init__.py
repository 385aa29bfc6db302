"""PyTorch: `attach()` synchronises and watches a DistributedDataParallel model."""

from ringside.sync.attachment import Attachment, attach, attachment_of
from ringside.sync.process_group_counters import carried
from ringside.sync.session import Session, log

__all__ = ["Attachment", "Session", "attach", "attachment_of", "carried", "log"]
