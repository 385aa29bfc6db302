"""The algorithms, one file per family: functions of the number of ranks that return a `Schedule`.

chain         The chain
direct        Direct
doubling      Recursive doubling
exchange      Gather, scatter, all-to-all and barrier among n ranks: everybody's own piece, straight to where it belongs
hierarchical  Hierarchical
ring          The ring
tree          The tree
"""
