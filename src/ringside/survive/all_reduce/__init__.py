"""Gradients summed among the members of one generation, on one host or between hosts.

between_hosts  A generation's exchange between hosts: the engine's interpreter over messages, on links that only this
               one uses, along a ring that no broken link is part of
gradients      A model's gradients as one piece of memory: where each parameter's lies, and how runs of one dtype are
               added up
one_host       All-reduce among the workers of one host by pulling: everybody reads everybody's arena, nobody writes
               another's
"""
