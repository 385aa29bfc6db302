"""The algorithms, one file per family: functions of the number of ranks that return a `Schedule`.

direct        Direct algorithms: everybody's own piece straight to where it belongs, without a rank in between
doubling      Recursive doubling
hierarchical  Hierarchical
ring          The ring and the chain: every rank sends to a neighbour only
tree          The tree
"""
