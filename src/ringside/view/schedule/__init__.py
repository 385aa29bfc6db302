"""Drawings of schedules: layout, frames, SVG and text.

arrange  Where the vertices of a picture go: on a circle, round a middle, along a line, as a tree or as two
drawing  The picture of a schedule: who sends which chunk to whom in every round, and what every chunk already contains
frames   What happens in a schedule, round by round, as it is drawn: messages, and what everything drawn contains
layout   Where everything of a schedule's picture goes: vertices with their cells, and the arrows between them
shape    The shape of a schedule: whether its messages run round a ring, along a line, over trees, through a middle
svg      One frame of a schedule as SVG, and several of them side by side in one file
text     A schedule for the terminal, 80 columns wide
"""
