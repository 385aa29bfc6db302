"""`communicator(group)`: a communicator over a process group, on one host or several.

between_hosts  All-reduces of a communicator whose ranks are on several hosts: which way, and what is learned of what it
               took
communicator   `communicator(group)`: Ringside's collectives among the ranks of a process group, on one host or several
gpu            All-reduces of tensors on a GPU: the group's own collective, or a schedule over its point-to-point
one_host       All-reduces of a communicator whose ranks all share memory: the host's own, by the algorithm that was
               asked for
options        What a communicator was asked for: by its maker, else by environment
"""
