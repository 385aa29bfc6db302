"""One schedule on one topology, exact: round by round, message by message, or in closed form.

closed_form    What a collective takes as a formula, on topologies whose hosts are all alike: flat ones, and hosts of
               several ranks
critical_path  The critical path of a simulation: what each of its pieces is, and whose fault it is
messages       A schedule's rounds as messages: all chunks that go from one vertex to another in a round travel as one
rounds         Rounds as max-plus steps of a clock per vertex, vectorised
simulate       A schedule played over a topology: exactly when every rank has finished, in max-plus arithmetic
timeline       What a simulation found: when every rank finished, every round's times, and the critical path
"""
