"""NCCL's logs and torch's watchdog: rings, settings, failures.

communicators   Communicators rebuilt from the logs: who was which rank, every channel's rings and trees, what every hop
                uses
faults          Failures in NCCL's own words: which rank failed first, which only lost its peer
lines           NCCL's lines in any log, whatever stands around them and however many ranks write into one file
reader          Reader of logs with NCCL's lines (`NCCL_DEBUG=INFO`) or PyTorch's watchdog, of one rank or of many in
                one file
rings           What is wrong with a communicator's rings: broken, across hosts more often than needed, over sockets
settings        What NCCL prints of its version, its environment and its network, process by process, and where ranks
                disagree
torch_watchdog  PyTorch's own lines in a log: the NCCL watchdog's timeouts and torchrun's account of which worker failed
                first
"""
