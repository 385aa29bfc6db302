"""Paths in, sources out: folders walked, archives opened, large traces read in pieces.

archives      Members of tar and zip archives as sources of their own
chrome_trace  Chrome traces of any size, a few megabytes at a time: cut at the border of two events, decoded in batches
progress      How far the doctor is, for the person who waits for it
source        A file worth reading, wherever it lies, and what is too much of it
streams       Bytes of untrusted files: a part of a file, and gzip that neither bursts nor raises
walk          From paths to files worth reading: folders, globs, gzip, tar and zip, all of it within bounds
"""
