"""The detector: which rank became slower than the others, since when, by how much.

detector      Find the rank that holds a job up: from own times to verdicts, over a whole run or one step at a time
noise         How noisy a job is, learnt from a stretch of healthy steps: what each rank usually exceeds the others by,
              how widely it scatters, and how far the mean of a window wanders by chance
pauses        A rank that pauses again and again: short in its typical step and yet what the others wait for
watcher       What watches the ranks of a job, each beside those that do the same work: a detector for each set of
              peers, with causes and prices, and what is worth telling
window_test   The one test: whether the mean log excess of a window is more than chance gives, at every step
"""
