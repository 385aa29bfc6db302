"""A training step with something changed: a late rank, a slow link, other hosts.

price    What is left of a step's synchronisation, priced: by a law, by a schedule, and by a law moved as its schedule
         moves
step     A training step, what may be different about it, and the step that it would be then
what_if  What would change in a training step if one thing about it were different: `what_if(step, change)` -> `Answer`
"""
