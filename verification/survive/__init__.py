"""The proof that steps are exactly-once, of the very state machine that training uses (`make prove`).

Two ways, beside each other. **The kill matrix**: a whole job on a simulated network, against every fault in every
phase. `simulated_world` is the clock, the network and the registers; `simulated_process` executes a member's
instructions as a driver would; `simulated_exchange` runs a schedule message by message; `invariants` are checked
whenever something happens; `faults` and `kill_matrix` define what is done to which rank and when, and do it. `mutants`
break the rules one by one (`broken_rules` has them, and makes the state machine that breaks one): the matrix must
notice. The model (`sample_counting`) has one parameter per sample, and a step adds 1 to each of its samples', so its
weights are the multiset of the samples trained on.

**The model checker**: every state that a small job can reach. `model_checker` searches, `checker_transitions` lists
what can happen next, `checker_state` is what is known at one moment.

`loaders` is a matrix of its own, over samplers: what is handed out while ranks die and jobs resume. `audit` reads the
registers that a job of real processes has left, for tests and benchmarks of whole jobs.
"""
