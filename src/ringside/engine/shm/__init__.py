"""One host: every rank's memory is mapped by all, and the native core sums slices in place.

communicator   One rank's end of a group of ranks that share a host: all-reduce, barrier, symmetric memory, sub-groups
log            What each collective took, on this rank, and when every rank arrived at it
meeting_place  Where the ranks of a host meet that know nothing of each other but a key, and where no other user can
               come between
memory         Symmetric memory: pieces of memory of every rank that all the others have mapped
program        Compile a schedule into the instructions of one rank for the native interpreter
rendezvous     How the ranks of one host find each other and hand file descriptors around
"""
