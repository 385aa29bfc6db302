"""PyTorch's flight-recorder dumps: who hangs where, and who called something else.

dump      One rank's flight-recorder dump as a value: which collectives it entered, which of them ended
groups    All ranks' dumps side by side: where every rank stands in every process group
hang      Who holds a hung job up: the first cause, separated from the ranks that only wait because of it
load      A flight-recorder dump's bytes as plain values: JSON, or a pickle of which every global is refused
mismatch  Ranks that called different collectives under the same number: another operation, size or dtype, or another
          order
reader    Reader of flight-recorder dumps (`TORCH_FR_BUFFER_SIZE`, `torch._C._distributed_c10d._dump_*_trace`)
tables    Dumps as lanes and tables for the page
verdicts  What the dumps of one job mean, as verdicts: the culprits named, the others counted as waiting
"""
