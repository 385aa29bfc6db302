"""Logs of single collectives, as NCCL's profilers write them: which rank the others wait for, and over which link.

clog       Reader of torchcomms' ClogHook
comma      Reader of Google's CoMMA
follow     Such logs in a folder, judged again while a job writes them
inspector  Reader of NCCL's Inspector and of RCCL's
judge      Who came last, from the calls that all ranks of a communicator recorded; which share of them was seen
record     One structure for all of them: a call's communicator, function, number, rank, start and duration
"""
