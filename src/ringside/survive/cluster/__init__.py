"""Who is there and how they are reached: rendezvous, peers, registers, shared memory.

failpoints     Named moments of a step, at which a test may stop or kill a worker
known_workers  The other workers of a job as processes, each looked up once; which ranks do not come any more
links          Links between hosts, each a group of two: a transport of them, and knocking before one asks to join
peers          Peers as processes of this host: who they are, whether they live, making sure that one is dead, and
               waiting for them
registers      Registers that a job's processes agree through: written once, or compared and set
rendezvous     Where the workers of a job find each other: names in the store, mail, and the thread that reads it
shared_memory  Memory with a single writer: an arena that its owner maps writable and then seals, and that peers can
               only read
store_host     The store of a job whose launcher gives none: `python -m ringside.survive.cluster.store_host PORT`
"""
