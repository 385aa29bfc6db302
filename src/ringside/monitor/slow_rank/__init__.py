"""The detector: which rank became slower than the others, since when, by how much.

change_point     A jump of one rank's excess, seen at once: windows side by side, for few ranks in rough noise
detector         Find the rank that holds a job up: from own times to verdicts, over a whole run or one step at a time
level_shift      A level that shifted and stayed: the steps since then against all before, with the noise learnt from
                 both sides
noise            How noisy a job is, learnt while it runs: what each rank usually exceeds the others by, and how widely
                 it varies
pauses           A rank that pauses again and again: short in its typical step and yet what the others wait for
robust           Statistics that few late steps do not spoil: medians, scales and autocorrelations of the core of the
                 noise
verdict          From an episode of one rank to a verdict: slow hardware or more work, with the numbers that say so
                 and its price
watcher          The watcher of ranks' own times: the detector, with causes and prices
window_test      The arithmetic of the detector: means of log excess over windows, for many ranks at once, one step at a
                 time
window_variance  How far the mean of a window wanders by chance, learnt from the job itself: one way for few ranks, one
                 for many
"""
