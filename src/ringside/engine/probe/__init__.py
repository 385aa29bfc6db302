"""Timing links: latency and bandwidth between hosts, in about a second.

links         What measured links say: which are slow, and which order of a ring goes round them
prober        Times the links between hosts (or ranks): latency, rate, and what a host's links carry together
reachability  Which links carry anything at all: plain TCP between all pairs of vertices, each bounded, before anything
              else
"""
