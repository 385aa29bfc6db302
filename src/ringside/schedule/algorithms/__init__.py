"""The algorithms, one file per family: functions of the number of ranks that return a `Schedule`.

direct        Direct
doubling      Recursive doubling
exchange      Gather, scatter, all-to-all and barrier among n ranks: everybody's own piece, straight to where it belongs
hierarchical  Hierarchical
ring          The ring and the chain: every rank sends to a neighbour only
tree          The tree
"""
