"""`verify`: a schedule is proved right, or the chunk, rank and round that is wrong is named.

audit        What `verify` says about a schedule
expressions  Symbolic values: which additions, in which order, made the content of a chunk
results      Whether the values that ranks end with are the ones the collective wants
safety       What can be wrong with one round: transfers that cannot be, writes without an order, ranks that wait for
             ever
verify       The proof that a schedule is what it says it is, and what it costs: from all of it, or where it is
             rotational from one rank's share
"""
