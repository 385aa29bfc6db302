"""Steps of every rank to rank 0, which judges them and writes the run.

parameter_digests  Digests of a model's parameters: taken by the training thread every K steps, compared by rank 0
                   behind its back
rank0              Rank 0's part of a session: everybody's records come in
record_transport   Brings step records from every rank to rank 0, over the job's own store, and watches that store
session            One training process's monitoring: cuts steps, adds to their records what the kernel and the GPU's
                   driver say, sends them to rank 0, and there watches them and writes the run
"""
