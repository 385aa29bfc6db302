"""The proof: the very state machine that training uses, on a simulated network, against every fault in every phase.

`world` is the clock, the network and the registers; `process` carries out a member's instructions as a driver would;
`exchange` walks a schedule message by message; `ledger` holds the invariants; `faults` and `matrix` say what is done
to whom and when; `controls` break the rules one by one. The *sample-counting model* has one parameter per sample, and
a step adds 1 to each of its samples', so its weights are the multiset of the samples that were trained on.
"""
