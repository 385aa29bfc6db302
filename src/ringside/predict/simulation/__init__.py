"""One schedule on one topology, exact: round by round, message by message, or in closed form.

closed_form  What a collective takes as a formula, on topologies whose hosts are all alike: flat ones, and hosts of
             several ranks
rounds       A schedule's rounds as messages, and as max-plus steps of a clock per vertex, vectorised
simulate     A schedule played over a topology: exactly when every rank has finished, in max-plus arithmetic
timeline     What a simulation found: when every rank finished, every round's times, and the critical path
"""
