"""Paths in, sources out: folders walked, archives opened, large traces read in pieces.

chrome_trace  Chrome traces of any size, a few megabytes at a time: cut at the border of two events, decoded in batches
source        What a reader is given: a file worth reading, wherever it lies, what is too much of it, its bytes, which
              are not trusted, and whom it tells how far it is
walk          From paths to files worth reading: folders, globs, gzip, tar and zip, all of it within bounds
"""
