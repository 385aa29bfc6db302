"""Drawings of schedules: layout, frames, SVG and text.

arrange  Where the vertices of a picture go: on a circle, round a middle, along a line, as a tree or as two
drawing  The picture of a schedule: who sends which chunk to whom in every round, and what every chunk already contains
frames   What is drawn of a schedule: its messages round by round, what everything contains, and the shape of it all
layout   Where everything of a schedule's picture goes: vertices with their cells, and the arrows between them
text     A schedule for the terminal, 80 columns wide
"""
