"""Tables as others write them."""

HEADER = "cluster,nodes,gpus,algo,size_bytes,time_us,algbw_GBps,busbw_GBps\n"


LOG = """\
# nThread 1 nGpus 1 minBytes 8 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1
# Using devices
#  Rank  0 Group  0 Pid   7085 on nodeA device  0 [0000:05:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   7086 on nodeA device  1 [0000:25:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid   7087 on nodeB device  0 [0x45] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid   7088 on nodeB device  1 [0x65] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""


ROWS = """\
     1048576        262144     float     sum      -1    50.00   20.97   31.46      0    49.00   21.40   32.10      0
     4194304       1048576     float     sum      -1    100.0   41.94   62.91      0    99.00   42.37   63.55    N/A
    16777216       4194304     float     sum      -1    300.0   55.92   83.89    N/A    299.0   56.11   84.17    N/A
"""


def result(size, time, factor=1.5, **more):
    rate = size / time / 1e3
    return {"size": size, "out_of_place": {"time": time, "alg_bw": rate, "bus_bw": rate * factor}, **more}
