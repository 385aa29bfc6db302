"""`ringside serve`: the live page and its feed.

app      Serves the live page until it is told to stop, to this host alone or to whoever has the token
feed     The runs that the page shows, and a feed for each: one thread follows a directory, and no reader ever waits
guard    Where the page listens, by which names it may be called, and who is at the other end of its connections
history  Every step of a run that goes on, in little memory: what the page's heat map and lines are drawn from
state    What the page shows at the top, as plain data: the verdicts in words, the ranks' figures, who waits for whom
"""
