"""`ringside top`: the live table in a terminal.

app          `ringside top` on the screen: verdicts first, a line per rank, and keys
console      Text from elsewhere (names of hosts and runs, causes) made fit for a terminal, and for one without UTF-8
rank_table   Rows of `ringside top`: which ranks in which order, and each as cells
rank_widget  The table of ranks as a widget: however many there are, only lines on the screen are formatted and sent
source       What `ringside top` shows: a run as it is now, as a value, and where it comes from
text         The words of `ringside top`: its first line, its verdicts, and everything that is known of one rank
"""
