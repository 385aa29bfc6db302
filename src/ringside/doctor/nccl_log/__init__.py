"""NCCL's logs and torch's watchdog: rings, settings, failures.

communicators  Communicators rebuilt from the logs: who was which rank, every channel's rings and trees, what every hop
               uses, and what is wrong with the rings
faults         Failures in the words of NCCL, of PyTorch's watchdog and of torchrun: which rank failed first
lines          NCCL's lines in any log, whatever stands around them and however many ranks write into one file
reader         Reader of logs with NCCL's lines (`NCCL_DEBUG=INFO`) or PyTorch's watchdog, of one rank or of many in one
               file
settings       What NCCL prints of its version, its environment and its network, process by process, and where ranks
               disagree
"""
