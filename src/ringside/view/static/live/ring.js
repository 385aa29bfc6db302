// The ranks as the algorithm connects them, on a ring or as a tree, with arrows from who waits to whom they wait for.

import { duration, put, shape } from "./words.js";

const CENTRE = 210;
const RADIUS = 150;
const MOST_NAMES = 32;
const CALM_ARROWS = 6;

export class Ring {
  constructor(svg, list, { onSelect }) {
    [this.svg, this.list, this.onSelect] = [svg, list, onSelect];
    this.said = "";
  }

  show({ ranks, arrows, topology, culprits, chosen, excess, step }) {
    if (!culprits.size) arrows = arrows.slice(0, CALM_ARROWS);
    const said = JSON.stringify([ranks, arrows.map(([a, b, s]) => [a, b, s.toPrecision(2)]), topology?.edges.length, [...culprits], chosen]);
    if (said === this.said) return;
    this.said = said;
    this.ranks = ranks;
    this.size = Math.min(22, (0.42 * 2 * Math.PI * RADIUS) / Math.max(ranks, 1));
    this.places = topology?.tree ? tree(topology.edges, ranks) : circle(ranks);
    if (topology?.tree) this.size = Math.min(this.size, 16);
    // Waits that are a small part of a step are thin, however large beside the others.
    const most = Math.max(...arrows.map(([, , seconds]) => seconds), 0.1 * (step || 0), 1e-12);
    put(
      this.svg,
      this.tips(),
      ...(topology ? topology.edges.map((edge) => this.edge(edge)) : [shape("circle", { class: "track", cx: CENTRE, cy: CENTRE, r: RADIUS })]),
      ...arrows.slice().reverse().map((arrow) => this.arrow(arrow, most, culprits.has(arrow[1]))),
      ...this.places.flatMap((place, rank) => this.node(place, rank, culprits.has(rank), rank === chosen, excess[rank])),
      ...this.count(topology),
    );
    this.tell(arrows, culprits);
  }

  // In the corner, where no arrow goes.
  count(topology) {
    if (topology || this.ranks <= MOST_NAMES) return [];
    return [
      shape("text", { class: "many", x: 8, y: 24 }, this.ranks.toLocaleString("en")),
      shape("text", { class: "small", x: 8, y: 48 }, "ranks"),
    ];
  }

  tips() {
    const made = shape("defs");
    for (const [id, colour] of [["tip-wait", "head"], ["tip-culprit", "head culprit"]]) {
      const marker = shape("marker", { id, viewBox: "0 0 8 8", refX: 5, refY: 4, markerUnits: "userSpaceOnUse", markerWidth: 15, markerHeight: 15, orient: "auto" });
      marker.append(shape("path", { d: "M0 .6 7.4 4 0 7.4z", class: colour }));
      made.append(marker);
    }
    return made;
  }

  edge([a, b]) {
    const [x0, y0] = this.places[a], [x1, y1] = this.places[b];
    return shape("line", { class: "edge", x1: x0, y1: y0, x2: x1, y2: y1 });
  }

  arrow([waiting, awaited, seconds], most, culprit) {
    const [x0, y0] = this.places[waiting], [x1, y1] = this.places[awaited];
    const length = Math.hypot(x1 - x0, y1 - y0) || 1, bend = this.ranks > 2 ? 0.3 : 0;
    const x = (x0 + x1) / 2 + bend * (CENTRE - (x0 + x1) / 2) + (26 * (y1 - y0)) / length;
    const y = (y0 + y1) / 2 + bend * (CENTRE - (y0 + y1) / 2) + (26 * (x0 - x1)) / length;
    const [ax, ay] = towards(x0, y0, x, y, this.size + 3), [bx, by] = towards(x1, y1, x, y, this.size + (culprit ? 13 : 9));
    const path = shape("path", {
      class: culprit ? "wait culprit" : "wait",
      d: `M${ax.toFixed(1)} ${ay.toFixed(1)}Q${x.toFixed(1)} ${y.toFixed(1)} ${bx.toFixed(1)} ${by.toFixed(1)}`,
      "stroke-width": (1.2 + ((this.ranks <= MOST_NAMES ? 4 : 1.6) * seconds) / most).toFixed(1),
      "marker-end": `url(#tip-${culprit ? "culprit" : "wait"})`,
    });
    path.append(shape("title", {}, `rank ${waiting} waits ${duration(seconds)} per step for rank ${awaited}`));
    return path;
  }

  node([x, y], rank, culprit, chosen, excess) {
    const made = [], size = Math.max(this.size, culprit ? 6 : 1.2);
    if (culprit) made.push(shape("circle", { class: "halo", cx: x, cy: y, r: size + 5 }));
    const node = shape("circle", { class: `node${culprit ? " culprit" : ""}${chosen ? " chosen" : ""}`, cx: x, cy: y, r: size });
    node.append(shape("title", {}, `rank ${rank}${Number.isFinite(excess) ? `, ${(100 * excess).toFixed(1)}% above the others` : ""}`));
    node.addEventListener("click", () => this.onSelect(rank));
    made.push(node);
    if (this.ranks <= MOST_NAMES) made.push(shape("text", { x, y }, String(rank)));
    if (culprit) {
      const side = x < CENTRE - RADIUS / 2 ? " left" : x > CENTRE + RADIUS / 2 ? " right" : "";
      const [lx, ly] = towards(x, y, CENTRE, CENTRE, -(size + (side ? 11 : 20)));
      made.push(shape("text", { class: `word${side}`, x: lx, y: ly }, this.ranks <= MOST_NAMES ? "slow" : `rank ${rank}`));
    }
    return made;
  }

  tell(arrows, culprits) {
    const lines = arrows.slice(0, 4).map(([waiting, awaited, seconds]) => {
      const item = document.createElement("li"), name = document.createElement("b");
      name.textContent = `${waiting} → ${awaited}`;
      if (culprits.has(awaited)) item.className = "culprit";
      item.append(name, `${duration(seconds)} per step`);
      return item;
    });
    const none = document.createElement("li");
    none.textContent = "No rank waits.";
    put(this.list, ...(lines.length ? lines : [none]));
  }
}

function circle(ranks) {
  return Array.from({ length: ranks }, (_, rank) => {
    const angle = (2 * Math.PI * rank) / Math.max(ranks, 1) - Math.PI / 2;
    return [CENTRE + RADIUS * Math.cos(angle), CENTRE + RADIUS * Math.sin(angle)];
  });
}

// Levels from the middle of the tree down; leaves side by side, parents above the middle of their children.
function tree(edges, ranks) {
  const near = Array.from({ length: ranks }, () => []);
  for (const [a, b] of edges) { near[a].push(b); near[b].push(a); }
  const reach = (from) => {
    const seen = new Map([[from, null]]);
    for (const rank of seen.keys()) for (const next of near[rank]) if (!seen.has(next)) seen.set(next, rank);
    return seen;
  };
  const path = [];
  const far = [...reach([...reach(0).keys()].pop()).entries()], before = new Map(far);
  for (let rank = far[far.length - 1][0]; rank !== null; rank = before.get(rank)) path.push(rank);
  const root = path[path.length >> 1], places = Array.from({ length: ranks }, () => [CENTRE, CENTRE]);
  let leaves = 0, deepest = 0;
  const lay = (rank, parent, depth) => {
    deepest = Math.max(deepest, depth);
    const children = near[rank].filter((next) => next !== parent);
    const across = children.length ? children.map((child) => lay(child, rank, depth + 1)).reduce((a, b) => a + b) / children.length : leaves++;
    places[rank] = [across, depth];
    return across;
  };
  lay(root, null, 0);
  return places.map(([across, depth]) => [30 + (360 * (across + 0.5)) / leaves, 50 + (320 * depth) / Math.max(deepest, 1)]);
}

function towards(x, y, toX, toY, distance) {
  const length = Math.hypot(toX - x, toY - y) || 1;
  return [x + ((toX - x) * distance) / length, y + ((toY - y) * distance) / length];
}
