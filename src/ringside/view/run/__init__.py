"""A run as a value that views read: recorded, live, or two compared.

comparison     Two runs side by side: what changed, and whether by more than chance
live           A run that goes on, as live views see it: the newest steps of every rank as arrays, and what was found
recorded       A recorded run as a value: for notebooks, for comparisons, for exports
training_step  A recorded run as the step that `ringside.predict.what_if` changes: its own times, what it synchronised
               and how
"""
