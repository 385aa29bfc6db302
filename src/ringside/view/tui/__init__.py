"""`ringside top`: the live table in a terminal.

app         `ringside top` on the screen: verdicts first, a line per rank, and keys
console     Text from elsewhere (names of hosts and runs, causes) made fit for a terminal, and for one without UTF-8
rank_table  The table of ranks as a widget: however many there are, only the lines on the screen are formatted and sent
remote      A run seen over the network: what `ringside serve` says at /api, for `ringside top http://host:port`
source      What `ringside top` shows: a run as it is now, as a value, and where it comes from
text        The words of `ringside top`: its first line, its verdicts, and everything that is known of one rank
"""
