"""`attach()`: DDP's backward watched, or its buckets reduced through its communication hook.

attach            `attach()`: one line that synchronises and watches a DistributedDataParallel model
attached_model    An attached model: what `attach()` returns, and DDP's methods, changed once for the class, that report
                  to it
backward          What is followed of one model's backward, reduced by us or only watched
bucket_memory     DDP's buckets in memory that the host's ranks map, from the moment when DDP makes them
cuda_events       Marks in the queue of a CUDA device: events with a time, that are asked for and never waited for
error_feedback    What was rounded away of each gradient bucket on its way between hosts, added to the same bucket of
                  the next step
hook              The communication hook that DDP calls for every bucket
reducers          Who averages gradient buckets: the process group's own collective, a user's hook, or Ringside's engine
ringside_reducer  Gradient buckets reduced by Ringside's engine, each started before the one before it is done
watcher           DDP's backward watched from outside, by autograd's callbacks; no communication hook
"""
