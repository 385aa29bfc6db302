"""Between hosts: shared memory inside, a schedule over messages outside.

attribution               Who is to blame when a collective between hosts fails, and the error that says so
collectives               The collectives besides all-reduce, between hosts: each is a schedule and a list of where its
                          chunks lie
hierarchical              Collectives among ranks on several hosts: a schedule over messages, shared memory inside a
                          host
hierarchical_collectives  Collectives besides all-reduce on hosts of several ranks: shared memory inside, a lane per
                          local rank between hosts
host_slices               The part of a hierarchical all-reduce that happens inside a host, in shared memory
persistent                A small all-reduce between hosts that is called again and again: all but the work itself is
                          done beforehand
rank_map                  Which ranks are on which host, and that they fit together
reduction                 What is to be done to the elements of a tensor, and one rank's part in it between hosts
"""
