// What every part of the tensor contains, and how vertices show it: shared by the page that steps through rounds and the
// page that plays simulated time.
"use strict";
const cellsOf = (data, svg) => {
  const { ranks, links, cards, cell } = data;
  const nodes = [...svg.querySelectorAll(".node")];
  const parts = data.parts, vertices = ranks + data.switches;

  const all = [...Array(ranks).keys()];
  const everyPart = [...Array(parts).keys()];
  const holders = (part) => (data.holders ? data.holders[part] : all);
  const wants = Array.from({ length: parts }, (_, part) => data.wants && new Set(data.wants[part]));
  const wanted = (vertex, part) => vertex < ranks && (!wants[part] || wants[part].has(vertex));
  const shown = cards.map((card) => card[1] ?? everyPart);
  const places = cards.map(([, , columns, across, down, x, y], node) =>
    shown[node].map((_, i) => [x + (i % columns) * across, y + Math.floor(i / columns) * down]));

  // ---- what every part contains: per vertex and part a set of ranks (two words), and of those in it twice (two more)

  const full = everyPart.map((part) => holders(part).reduce((set, rank) => (set[rank >> 5] |= 1 << (rank & 31), set), [0, 0]));
  const states = [start()];

  function start() {
    const state = new Int32Array(vertices * parts * 4);
    for (let part = 0; part < parts; part++)
      for (const rank of holders(part)) state[(rank * parts + part) * 4 + (rank >> 5)] |= 1 << (rank & 31);
    return state;
  }

  function* messages(round) {
    const code = data.rounds[round] ?? [];
    for (let i = 0; i < code.length; i += 2 + code[i + 1]) {
      const link = links[code[i] >> 1];
      yield { link, src: cards[link[0]][0], dst: cards[link[1]][0], adds: code[i] & 1, parts: code.slice(i + 2, i + 2 + code[i + 1]) };
    }
  }

  // One message lands: what it carries is what its sender held in `before`.
  function apply(after, before, { src, dst, adds, parts: moved }, cleared) {
    for (const part of moved) {
      const from = (src * parts + part) * 4, to = (dst * parts + part) * 4;
      if (!adds || (dst >= ranks && !cleared.has(to))) after.fill(0, to, to + 4);
      cleared.add(to);
      for (let word = 0; word < 2; word++) {
        after[to + 2 + word] |= before[from + 2 + word] | (after[to + word] & before[from + word]);
        after[to + word] |= before[from + word];
      }
    }
  }

  // Everything sent in a round had its value when the round began. A switch remembers nothing.
  function state(frame) {
    while (states.length <= frame) {
      const before = states[states.length - 1], after = before.slice(), cleared = new Set();
      for (const message of messages(states.length - 1)) apply(after, before, message, cleared);
      states.push(after);
    }
    return states[frame];
  }

  const holds = (from, at, rank) => (from[at + (rank >> 5)] >>> (rank & 31)) & 1;
  const twice = (from, at) => data.once && (from[at + 2] || from[at + 3]);
  const done = (from, at, vertex, part) =>
    wanted(vertex, part) && !twice(from, at) && from[at] === full[part][0] && from[at + 1] === full[part][1];

  // ---- vertices

  const round1 = (value) => Math.round(value * 10) / 10;
  const rectangle = (x, y, wide, high) => `M${round1(x)} ${round1(y)}h${round1(wide)}v${round1(high)}h${round1(-wide)}z`;
  const path = (name, d, more = "") => (d ? `<path class="${name}"${more} d="${d}"/>` : "");
  const square = ([x, y], more) => rectangle(x - more, y - more, cell + 2 * more, cell + 2 * more);

  function fill(node, held, before) {
    const vertex = cards[node][0], strips = new Map();
    let track = "", level = "", complete = "", double = "", fresh = "";
    shown[node].forEach((part, i) => {
      const at = (vertex * parts + part) * 4, [x, y] = places[node][i], from = holders(part);
      track += square([x, y], 0);
      const there = from.filter((rank) => holds(held, at, rank));
      if (data.strips)
        from.forEach((rank, place) => {
          if (holds(held, at, rank))
            strips.set(rank, (strips.get(rank) ?? "") + rectangle(x + (place * cell) / from.length, y, cell / from.length, cell));
        });
      else if (there.length) level += rectangle(x, y + cell * (1 - there.length / from.length), cell, (cell * there.length) / from.length);
      if (twice(held, at)) double += square([x, y], 1);
      else if (done(held, at, vertex, part)) complete += square([x, y], 1);
      if (before && [0, 1, 2, 3].some((word) => held[at + word] !== before[at + word])) fresh += square([x, y], 0);
    });
    if (before && !fresh) return;
    const cells = nodes[node].querySelector(".cells");
    cells.querySelectorAll("path").forEach((old) => old.remove());
    const bars = [...strips].sort(([a], [b]) => a - b).map(([rank, d]) => path("part", d, ` fill="${data.colours[rank]}" data-rank="${rank}"`));
    cells.insertAdjacentHTML("beforeend",
      path("track", track) + bars.join("") + path("level", level) + path("done", complete) + path("double", double) + path("fresh", fresh));
  }

  // Say what lies under the pointer; `held` returns what vertices hold now.
  const explain = (held) => nodes.forEach((group, node) => {
    const vertex = cards[node][0], title = group.querySelector("title"), who = `${vertex < ranks ? "rank" : "switch"} ${vertex}`;
    group.onpointermove = (event) => {
      const matrix = group.querySelector(".cells").getScreenCTM();
      const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse());
      const i = places[node].findIndex(([u, v]) => u <= x && x <= u + cell && v <= y && y <= v + cell);
      title.textContent = i < 0 ? who : `${who}, ${chunksOf([shown[node][i]]).map((chunk) => `c${chunk}`).join(" ")}: ${content(vertex, shown[node][i], held())}`;
    };
  });

  function content(vertex, part, held) {
    const at = (vertex * parts + part) * 4, from = holders(part), there = from.filter((rank) => holds(held, at, rank));
    if (!there.length) return "nothing";
    return there.length === from.length && from.length > 2 ? "the sum of all ranks" : there.map((rank) => `x${rank}`).join(" + ");
  }

  function chunksOf(some) {
    return some.flatMap((part) => data.chunks?.[part] ?? [part]).sort((a, b) => a - b);
  }

  const onCurve = ([, , ax, ay, cx, cy, bx, by], t) => [
    (1 - t) ** 2 * ax + 2 * t * (1 - t) * cx + t * t * bx,
    (1 - t) ** 2 * ay + 2 * t * (1 - t) * cy + t * t * by,
  ];

  // The nodes of the second tree follow those of the first.
  const treeOf = (node) => Math.floor(node / vertices);

  return { ranks, cards, cell, nodes, parts, vertices, holders, holds, messages, apply, state, fill, explain, chunksOf,
    onCurve, treeOf, round1 };
};
