"""What the kernel and the GPU report of a rank: processor time, throttling, swapping, clocks.

cgroup   The CPU quota that a process lives under, and how long it stood still because of it: cgroup v1 and v2
gpu      How a GPU does, from NVIDIA's management library: its clock, and why that is no higher
process  What the kernel knows of this process: whether it had a CPU whenever it wanted one, and what kept it from
         working
shares   Vitals as shares of a rank's own time: one number per row, comparable between ranks and times
"""
