"""Hangs: who is missing from which collective, from what every rank reports of itself. Pure functions.

attribution  Where one rank stands, as plain values that any rank can judge; and who keeps a standing job from going
             on: a pure function of where every rank stands
detector     The hang watch: where every rank stands goes in, from time to time; verdicts come out, in plain words
"""
