"""`ringside serve`: the live page and its feed.

app      Serves the live page until it is told to stop
feed     One run for many readers: one thread follows its directory, everybody gets the newest state and never waits
guard    Who may read the page: this host alone, or whoever has the token
history  Every step of a run that goes on, in little memory: what the page's heat map and lines are drawn from
runs     Which runs there are to show: those going on here, and those under a directory
state    What the page shows at the top, as plain data: the verdicts in words, the ranks' figures, who waits for whom
"""
