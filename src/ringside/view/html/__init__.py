"""Pages that are one file.

charts      Charts of the report: inline SVG that stretches with the page, labels in HTML so that they never shrink
curves      Curves over a logarithmic axis: sizes, hosts, buckets
doctor      The doctor's findings as one HTML page that needs nothing else: verdicts first, lanes, rings, tables
gantt       A simulated schedule over time: a lane per rank, what it sends above what it takes, and the critical path
            through
nccl_rings  Communicators drawn: ranks on a circle, hosts as arcs around, every hop by what it travels over
page        What the predictor's pages have in common: one self-contained file each, in the report's style
plan        A plan as a page: the verdict, its figures, and the curves over sizes, hosts and buckets
run_report  A run's report: one HTML file that needs nothing else, the verdict first
score       Scores as a page: what was measured beside what was predicted, in time and bandwidth, and by how much it is
            off
simulation  A simulated schedule as a page: its chunks under way in simulated time, a lane per rank, and what it waited
            for
waits_ring  The report's picture of the ring: who waited for whom
what_if     The answer of a what-if as a page: the difference, what it costs, and both steps drawn on the same time axis
"""
