"""Who stands in which collective: told out of band, with stacks, while the job hangs.

board          A page of memory per rank on which it says where it stands
host           The ranks of this host as one of them sees the others: their pages, their processes, their stacks
stacks         Where a thread of this process is: in which collective of PyTorch's, and in which line of the script
store_channel  What the hosts of a job tell each other about their ranks, over the job's store, about twice a second
watch          The hang watch of one process: says where this rank stands, looks at the others, and tells who keeps the
               job up
"""
