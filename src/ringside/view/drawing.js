"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const { ranks, links, cards, cell } = data;
  const svg = $("figure").querySelector("svg");
  const layer = svg.querySelector(".arrows");
  const nodes = [...svg.querySelectorAll(".node")];
  const parts = data.parts, last = data.rounds.length, vertices = ranks + data.switches;
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const REST = 1300, IN = 380, OUT = 480;
  let now = 0, timer = 0, flight = 0, landing = null, drawn = null;

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

  // Everything sent in a round had its value when the round began. A switch remembers nothing.
  function state(frame) {
    while (states.length <= frame) {
      const before = states[states.length - 1], after = before.slice(), cleared = new Set();
      for (const { src, dst, adds, parts: moved } of messages(states.length - 1))
        for (const part of moved) {
          const from = (src * parts + part) * 4, to = (dst * parts + part) * 4;
          if (!adds || (dst >= ranks && !cleared.has(to))) after.fill(0, to, to + 4);
          cleared.add(to);
          for (let word = 0; word < 2; word++) {
            after[to + 2 + word] |= before[from + 2 + word] | (after[to + word] & before[from + word]);
            after[to + word] |= before[from + word];
          }
        }
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

  // Say what lies under the pointer.
  nodes.forEach((group, node) => {
    const vertex = cards[node][0], title = group.querySelector("title"), who = `${vertex < ranks ? "rank" : "switch"} ${vertex}`;
    group.onpointermove = (event) => {
      const matrix = group.querySelector(".cells").getScreenCTM();
      const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(matrix.inverse());
      const i = places[node].findIndex(([u, v]) => u <= x && x <= u + cell && v <= y && y <= v + cell);
      title.textContent = i < 0 ? who : `${who}, ${chunksOf([shown[node][i]]).map((chunk) => `c${chunk}`).join(" ")}: ${content(vertex, shown[node][i])}`;
    };
    const mark = (on) => {
      svg.classList.toggle("focused", on);
      layer.querySelectorAll(".arrow").forEach((arrow) =>
        arrow.classList.toggle("hot", on && [+arrow.dataset.src, +arrow.dataset.dst].includes(vertex)));
    };
    group.onpointerenter = () => mark(true);
    group.onpointerleave = () => mark(false);
  });

  function content(vertex, part) {
    const at = (vertex * parts + part) * 4, from = holders(part), there = from.filter((rank) => holds(state(now), at, rank));
    if (!there.length) return "nothing";
    return there.length === from.length && from.length > 2 ? "the sum of all ranks" : there.map((rank) => `x${rank}`).join(" + ");
  }

  function chunksOf(some) {
    return some.flatMap((part) => data.chunks?.[part] ?? [part]).sort((a, b) => a - b);
  }

  // ---- arrows

  function arrows(round) {
    const sent = [...messages(round)];
    const ways = new Set(sent.map(({ src, dst }) => `${src} ${dst}`));
    const count = new Set(sent.map(({ src, dst, adds }) => `${src} ${dst} ${adds}`)).size;
    const look = count <= 2 * ranks || ranks <= 3 ? "" : count <= 32 ? "thin" : count <= 400 ? "crowded" : "dense";
    const taken = cards.map(([, , , , , , , x, y]) => [x - data.disc, y - data.disc, x + data.disc, y + data.disc]);
    return sent.map((message) => arrow(message, look, ways.has(`${message.dst} ${message.src}`) ? data.at[0] : data.at[1], taken)).join("");
  }

  function arrow({ link, src, dst, adds, parts: moved }, look, at, taken) {
    const [node, , ax, ay, cx, cy, bx, by] = link, scale = look ? 0.7 : 1;
    const length = Math.hypot(bx - cx, by - cy) || 1, ux = (bx - cx) / length, uy = (by - cy) / length;
    const x = bx - 9 * scale * ux, y = by - 9 * scale * uy, wide = 4.6 * scale;
    const head = [[bx + 2 * ux, by + 2 * uy], [x - wide * uy, y + wide * ux], [x + wide * uy, y - wide * ux]];
    const text = labelOf(moved), full = pill(`${adds ? "+" : "="} ${text}`);
    const labelled = data.labels && !look, thin = data.labels && look === "thin";
    const spot = labelled ? free(link, at, 7 * text.length + 26, 19, taken) : thin ? free(link, 0.3, 7 * text.length, 12, taken) : null;
    const mini = thin && spot !== null, rest = spot ?? (labelled ? at : 0.3);
    const dot = mini ? `<text class="mini">${text}</text>` : look === "dense" ? "" : '<circle class="dot" r="3.5"/>';
    const colour = look && src < ranks ? ` style="--add:${data.colours[src]};--copy:${data.colours[src]}"` : "";
    const tree = data.trees > 1 ? ` tree${treeOf(node)}` : "";
    return `<g class="arrow ${adds ? "add" : "copy"}${look ? ` thin ${look}` : ""}${tree}" data-src="${src}" data-dst="${dst}"${colour}>` +
      `<path class="line" d="M${ax} ${ay}Q${cx} ${cy} ${bx} ${by}"/><path class="head" d="M${head.map((point) => point.map(round1).join(" ")).join("L")}Z"/>` +
      `<g class="pill" data-rest="${rest}" transform="translate(${onCurve(link, rest).map(round1).join(" ")})">` +
      `${labelled ? full : `${dot}<g class="late">${full}</g>`}</g></g>`;
  }

  const onCurve = ([, , ax, ay, cx, cy, bx, by], t) => [
    (1 - t) ** 2 * ax + 2 * t * (1 - t) * cx + t * t * bx,
    (1 - t) ** 2 * ay + 2 * t * (1 - t) * cy + t * t * by,
  ];

  // Where on its arrow a label covers neither a disc nor another label, near `at` if it can; null: nowhere.
  function free(link, at, wide, high, taken) {
    for (const t of [at, 0.3, 0.36, 0.24, 0.42, 0.48, 0.54, 0.6, 0.66]) {
      const [x, y] = onCurve(link, t), [left, top, right, bottom] = [x - wide / 2, y - high / 2, x + wide / 2, y + high / 2];
      if (taken.some(([a, b, c, d]) => left < c && a < right && top < d && b < bottom)) continue;
      taken.push([left, top, right, bottom]);
      return t;
    }
    return null;
  }

  // The nodes of the second tree follow those of the first.
  const treeOf = (node) => Math.floor(node / vertices);

  function labelOf(moved) {
    const chunks = chunksOf(moved), [first, final] = [chunks[0], chunks[chunks.length - 1]];
    if (chunks.length <= 2) return chunks.map((chunk) => `c${chunk}`).join(" ");
    return final - first === chunks.length - 1 ? `c${first}-${final}` : `${chunks.length} chunks`;
  }

  function pill(text) {
    const wide = 7 * text.length + 12;
    return `<rect x="${-wide / 2}" y="-9.5" width="${wide}" height="19" rx="8"/><text>${text}</text>`;
  }

  // ---- one frame

  function show(frame, moving = false) {
    cancelAnimationFrame(flight);
    clearTimeout(landing?.timer);
    landing = null;
    now = frame;
    const held = state(frame);
    for (let node = 0; node < nodes.length; node++) fill(node, held, drawn);
    drawn = held;
    layer.innerHTML = arrows(frame);
    const name = frame === last ? "Done" : `Round ${frame}`;
    svg.setAttribute("aria-label", `${document.title}: ${name.toLowerCase()}. ${data.captions[frame]}`);
    $("name").textContent = name;
    $("caption").textContent = data.captions[frame];
    $("seek").value = frame;
    $("seek").setAttribute("aria-valuetext", name);
    $("back").disabled = frame === 0;
    $("next").disabled = frame === last;
    document.querySelectorAll("li.current").forEach((item) => item.classList.remove("current"));
    $(`words-${frame}`)?.classList.add("current");
    history.replaceState(null, "", `#round=${frame}`);
    if (moving && !still.matches) fly(0, null, IN);
  }

  // Move every label along its arrow, from `from` to `to` (null: where it rests). Only looks; see `land`.
  function fly(from, to, ms) {
    const labels = [...layer.querySelectorAll(".pill:not(.dense > .pill)")].map((label) => {
      const curve = [0, 0, ...label.parentNode.querySelector(".line").getAttribute("d").match(/-?[\d.]+/g).map(Number)];
      return { label, curve, from: from ?? +label.dataset.rest, to: to ?? +label.dataset.rest };
    });
    const begin = performance.now();
    const tick = (time) => {
      const share = Math.min(1, Math.max(0, (time - begin) / ms)), eased = share * share * (3 - 2 * share);
      for (const { label, curve, from, to } of labels)
        label.setAttribute("transform", `translate(${onCurve(curve, from + (to - from) * eased).map(round1).join(" ")})`);
      if (share < 1) flight = requestAnimationFrame(tick);
    };
    cancelAnimationFrame(flight);
    tick(begin);
  }

  // One round forward: its messages fly, and when they land the next round is shown.
  function advance(then) {
    const target = now + 1;
    const arrive = () => { show(target, true); then?.(); };
    if (still.matches || !layer.firstChild) return arrive();
    fly(null, 1, OUT);
    landing = { arrive, timer: setTimeout(land, OUT) };
  }
  function land() {
    landing?.arrive();
  }

  // ---- controls

  const playing = () => timer !== 0;
  function stop() {
    clearTimeout(timer);
    timer = 0;
    $("play").textContent = "Play";
  }
  function schedule() {
    // Many rounds take less time each, so that a whole schedule plays in about a minute.
    const rest = Math.max(250, Math.min(REST, 60000 / (last + 1) - OUT));
    timer = setTimeout(() => advance(() => { if (playing()) now === last ? stop() : schedule(); }), rest);
  }
  function toggle() {
    if (playing()) {
      stop();
      return land();
    }
    if (now === last) show(0, true);
    $("play").textContent = "Pause";
    schedule();
  }
  function go(frame) {
    stop();
    show(frame);
  }
  function move(by) {
    stop();
    land();
    if (by > 0 && now < last) advance();
    if (by < 0 && now > 0) show(now - 1);
  }

  $("back").onclick = () => move(-1);
  $("next").onclick = () => move(1);
  $("play").onclick = toggle;
  $("seek").oninput = (event) => go(+event.target.value);
  document.querySelectorAll("#words li").forEach((item) => (item.onclick = () => go(item.value)));
  addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const keys = { ArrowLeft: () => move(-1), ArrowRight: () => move(1), Home: () => go(0), End: () => go(last) };
    if (event.key in keys && event.target !== $("seek")) keys[event.key]();
    else if (event.key === " " && !event.target.closest?.("button, summary")) toggle();
    else return;
    event.preventDefault();
  });

  const asked = () => { const found = /round=(\d+)/.exec(location.hash); return found ? Math.min(last, +found[1]) : 0; };
  addEventListener("hashchange", () => go(asked()));
  document.documentElement.classList.add("scripted");
  $("controls").hidden = $("keys").hidden = last === 0;
  if (last > 8 || ranks > 8) $("words").open = false;
  show(asked());
})();
