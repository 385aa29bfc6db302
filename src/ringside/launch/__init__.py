"""Starting a job: torchrun as a child process, and a run that is followed from outside.

follow    A launched run, watched from outside until it ends: only its directory is read and its processes are counted
torchrun  torchrun as a child process: started with its own launcher, watched, and ended with everything below it
"""
