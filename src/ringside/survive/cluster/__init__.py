"""Who is there and how they are reached: rendezvous, peers, registers, shared memory.

failpoints     Named moments of a step, at which a test may stop or kill a worker
known_workers  The other workers of a job as processes, each looked up once
listener       A thread that looks at the store while the worker computes: mail, and the newest generation
pairwise       A transport between neighbours only: a group of two for every link that is used
peers          Peers as processes of this host: who they are, whether they live, and making sure that one is dead
reachability   Before a process asks to be a member it knocks: whoever cannot be reached would keep the others from
               every step
registers      Registers that a job's processes agree through: written once, or compared and set
rendezvous     Where the workers of a job find each other: names in the store, and mail between workers
shared_memory  Memory with a single writer: an arena that its owner maps writable and then seals, and that peers can
               only read
store_host     The store of a job whose launcher gives none: `python -m ringside.survive.cluster.store_host PORT`
waiting        Waiting for members, and noticing while it lasts that one of them is dead, stopped or silent
"""
