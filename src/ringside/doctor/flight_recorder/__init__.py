"""PyTorch's flight-recorder dumps: who hangs where, and who called something else.

causes    Who holds a hung job up, separated from the ranks that only wait because of it, and who called another
          collective than the others
dump      One rank's flight-recorder dump: its bytes as plain values (JSON, or a pickle of which every global is
          refused), and those as the calls that the rank made
groups    All ranks' dumps side by side: where every rank stands in every process group
reader    Reader of flight-recorder dumps (`TORCH_FR_BUFFER_SIZE`, `torch._C._distributed_c10d._dump_*_trace`), and
          dumps as lanes and tables for the page
verdicts  What the dumps of one job mean, as verdicts: the culprits named, the others counted as waiting
"""
