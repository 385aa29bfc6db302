"""Between hosts: shared memory inside, a schedule over messages outside.

attribution               Which rank a collective between hosts failed by, and the error that names it
blocks                    What an all-reduce is made of on one rank; and those for which nothing is kept ready, block
                          by block over hosts
collectives               The collectives besides all-reduce, between hosts: each is a schedule and a list of where
                          its chunks lie
context                   What all-reduces between hosts share on one rank: which ranks are where, what they run over,
                          what a spec means there; the shared memory of its host
hierarchical              Collectives among ranks on several hosts: a schedule over messages, shared memory inside a
                          host
hierarchical_collectives  Collectives besides all-reduce on hosts of several ranks: shared memory inside, a lane per
                          local rank between hosts
persistent                All-reduces between hosts that are called again and again: all but the work itself is done
                          beforehand
rank_map                  Which ranks are on which host, and that they fit together
reduction                 What is to be done to the elements of a tensor, and one rank's part in it between hosts
"""
