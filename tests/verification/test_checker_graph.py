"""The model checker's search backward: which states lead on to an end, and how those came about that do not."""

from verification.survive.model_checker import Graph


def graph(waits, ways, faults=()):
    """Return a graph of states by number: who waits in each, and the ways between them, some of which are faults."""
    made = Graph()
    for number, words in enumerate(waits):
        source = next((a for a, b in (*ways, *faults) if b == number and a < number), -1)
        made.add((number,), words, source, f"to {number}")
    for source, target in ways:
        made.join(source, target)
    return made


def test_where_every_state_leads_on_to_an_end_nothing_is_lost():
    around = graph(["a", "b", ""], [(0, 1), (1, 0), (1, 2), (2, 2)])
    assert around.lost() == ()
    assert (len(around), around.number((1,)), around.number((3,))) == (3, 1, None)


def test_states_that_only_lead_to_each_other_are_found_with_the_way_to_the_first():
    found = graph(["a", "", "b", "c"], [(0, 1), (0, 2), (2, 3), (3, 2)]).lost()
    assert found == ("no way leads to the end any more: b", "to 0", "to 2")


def test_an_end_that_only_a_fault_leads_to_does_not_count():
    found = graph(["a", "b", ""], [(0, 1)], faults=[(1, 2)]).lost()
    assert found == ("no way leads to the end any more: a", "to 0")
