"""Which algorithm: priced on measured links, timed, tried in the job, watched for drift, explained.

cache     Where selection tables are kept between runs: one readable JSON file per kind of job
drift     Whether all-reduces take longer than they should: a state machine over timings
explain   Why an all-reduce goes the way it goes, as a value and as text of 80 columns
selector  Chooses how all-reduces between hosts are carried out: by measurement, alike on all ranks, and says why
table     Which all-reduce for which size, and why: a table that all ranks hold alike
timing    Prices the candidates, times the best few of them, and makes the table of choices of it
trials    Promising choices are tried in the all-reduces of a size, as far as these pay for it: a state machine
"""
