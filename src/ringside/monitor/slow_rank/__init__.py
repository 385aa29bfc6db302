"""The detector: which rank became slower than the others, since when, by how much.

change_point  Where one rank's level changed, for few ranks in rough noise: a jump that is seen at once (windows side by
              side), an excess that lasts, and a level that shifted and stayed
detector      Find the rank that holds a job up: from own times to verdicts, over a whole run or one step at a time, and
              what watches a job with it, with causes and prices
noise         How noisy a job is, learnt while it runs: what each rank usually exceeds the others by, how widely it
              varies, and how far the mean of a window wanders by chance
pauses        A rank that pauses again and again: short in its typical step and yet what the others wait for
window_test   The arithmetic of the detector: means of log excess over windows, for many ranks at once, one step at a
              time
"""
