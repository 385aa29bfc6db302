"""What is known of a table before its figures: the law of its hardware, from words, presets, point-to-point tables."""

from __future__ import annotations

from dataclasses import dataclass

from ringside.predict import mpi
from ringside.predict.calibrate import vague
from ringside.predict.fabric import Law, law
from ringside.predict.recognise import recognise, sized_like
from ringside.predict.tables import ALL_REDUCE, Table
from ringside.predict.topology import Topology
from ringside.predict.topology_read import load_topology


@dataclass(frozen=True)
class Knowledge:
    """What tells the law of a table.

    Args:
        preset: A preset's or topology file's name; `auto`: the table's words.
        pairs: Point-to-point costs of CPU clusters.
    """

    preset: str = "auto"
    pairs: tuple[mpi.Pairs, ...] = ()

    def topology(self, table: Table) -> Topology | None:
        """Return the topology of a table; None where its words tell none."""
        if self.preset == "auto":
            return recognise(table)
        return sized_like(load_topology(self.preset), table)

    def law(self, table: Table) -> Law | None:
        """Return the law of a table; None where nothing is known of its hardware."""
        known = mpi.pairs_for(table, self.pairs) if self.preset == "auto" else None
        if known is not None and table.hosts > 1 and table.collective == ALL_REDUCE:
            return mpi.process_law(known, table.hosts, table.ranks)
        if is_mpi(table) and self.preset == "auto":
            return None
        topology = self.topology(table)
        return law(topology, table.collective, table.algorithm) if topology is not None else None

    def law_or_vague(self, table: Table) -> Law:
        """Return the law of a table; a vague one where nothing is known of its hardware."""
        found = self.law(table)
        return found if found is not None else vague(table.ranks, noisy=is_mpi(table))


def is_mpi(table: Table) -> bool:
    """Whether its ranks are processes of MPI, on CPUs as far as is known."""
    return "mpi" in table.algorithm.lower() or "osu" in table.algorithm.lower()
