// Simulated time, played: a chunk is where the simulation says it is, with the contributions it carries.
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const svg = $("figure").querySelector("svg"), layer = svg.querySelector(".arrows");
  const { ranks, cell, nodes, parts, vertices, holders, holds, messages, apply, state, fill, explain, onCurve, treeOf, round1 } =
    cellsOf(data, svg);
  const rounds = data.rounds.length, end = data.end;
  const LASTS = Math.min(40000, Math.max(8000, 700 * rounds)); // a whole play, milliseconds
  let at = 0, flight = 0, drawn = null, shownKey = "";

  // ---- who is where: times are whole numbers from 0 to data.scale

  const times = data.sent.map((row) => {
    const found = new Map();
    for (let i = 0; i < row.length; i += 4) found.set(`${row[i]} ${row[i + 1]}`, [row[i + 2], row[i + 3]]);
    return found;
  });
  const timed = data.rounds.map((_, k) =>
    [...messages(k)].map((message) => {
      const [begin, arrive] = times[k].get(`${message.src} ${message.dst}`) ?? [0, 0];
      return { ...message, round: k, begin, arrive, taken: Math.max(arrive, data.ready[k][message.dst]) };
    }));

  // The round every vertex is in.
  function roundOf(vertex, t) {
    let low = 0, high = rounds;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (data.ready[middle][vertex] <= t) low = middle; else high = middle - 1;
    }
    return low;
  }

  function moment(t) {
    const where = Array.from({ length: vertices }, (_, vertex) => roundOf(vertex, t));
    const held = new Int32Array(vertices * parts * 4), flying = [];
    where.forEach((k, vertex) => {
      const span = [vertex * parts * 4, (vertex + 1) * parts * 4];
      held.set(state(k).subarray(...span), span[0]);
    });
    for (let k = Math.min(...where); k <= Math.min(Math.max(...where), rounds - 1); k++) {
      const before = state(k), cleared = new Set();
      for (const message of timed[k]) {
        if (where[message.dst] === k && message.taken <= t) apply(held, before, message, cleared);
        else if (message.begin <= t && t < message.taken) flying.push(message);
      }
    }
    return { held, flying };
  }

  // ---- what flies: a cell like those at the ranks, with the contributions in it

  function parcel({ src, parts: moved, round, adds }) {
    const from = holders(moved[0]), before = state(round), where = (src * parts + moved[0]) * 4;
    const there = from.filter((rank) => holds(before, where, rank));
    const wide = Math.max(cell, 15), many = moved.length > 1;
    const bars = data.strips
      ? from.map((rank, i) => holds(before, where, rank)
        ? `<rect fill="${data.colours[rank]}" x="${round1(-wide / 2 + (i * wide) / from.length)}" y="${-wide / 2}" width="${round1(wide / from.length)}" height="${wide}"/>` : "").join("")
      : `<rect class="level" x="${-wide / 2}" y="${round1(wide / 2 - (wide * there.length) / from.length)}" width="${wide}" height="${round1((wide * there.length) / from.length)}"/>`;
    const behind = many ? `<rect class="behind" x="${-wide / 2 + 3}" y="${-wide / 2 - 3}" width="${wide}" height="${wide}"/>` : "";
    return `${behind}<rect class="ground" x="${-wide / 2}" y="${-wide / 2}" width="${wide}" height="${wide}"/>${bars}` +
      `<rect class="edge ${adds ? "add" : "copy"}" x="${-wide / 2}" y="${-wide / 2}" width="${wide}" height="${wide}"/>`;
  }

  function drawFlying(flying) {
    const key = flying.map(({ round, src, dst, adds }) => `${round} ${src} ${dst} ${adds}`).join(",");
    if (key === shownKey) return;
    shownKey = key;
    const count = flying.length, look = count <= 2 * ranks || ranks <= 3 ? "" : " thin";
    layer.innerHTML = flying.map(({ link, adds }) => {
      const [node, , ax, ay, cx, cy, bx, by] = link, tree = data.trees > 1 ? ` tree${treeOf(node)}` : "";
      return `<g class="arrow ${adds ? "add" : "copy"}${look}${tree}"><path class="line" d="M${ax} ${ay}Q${cx} ${cy} ${bx} ${by}"/></g>`;
    }).join("") + flying.map((message) =>
      `<g class="parcel" data-src="${message.src}" data-dst="${message.dst}">${parcel(message)}</g>`).join("");
  }

  function place(flying, t) {
    layer.querySelectorAll(".parcel").forEach((group, i) => {
      const { begin, arrive, link } = flying[i], share = arrive > begin ? Math.min(1, (t - begin) / (arrive - begin)) : 1;
      group.setAttribute("transform", `translate(${onCurve(link, share).map(round1).join(" ")})`);
    });
  }

  // ---- one moment

  function show(share) {
    at = Math.min(1, Math.max(0, share));
    const t = at * data.scale, { held, flying } = moment(t);
    for (let node = 0; node < nodes.length; node++) fill(node, held, drawn);
    drawn = held;
    drawFlying(flying);
    place(flying, t);
    $("clock").textContent = words(at * end);
    $("seek").value = Math.round(1000 * at);
    $("seek").setAttribute("aria-valuetext", words(at * end));
    document.querySelectorAll(".gantt").forEach((one) => {
      const cursor = one.querySelector(".cursor");
      cursor.hidden = false;
      cursor.style.left = `${(100 * at * end) / +one.dataset.end}%`;
    });
  }

  function words(seconds) {
    const [scale, unit] = end >= 1 ? [1, "s"] : end >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
    const digits = Math.max(0, 3 - Math.ceil(Math.log10(end * scale + 1e-12)));
    return `${(seconds * scale).toFixed(digits)} ${unit}`;
  }

  // ---- controls

  const playing = () => flight !== 0;
  function stop() {
    cancelAnimationFrame(flight);
    flight = 0;
    $("play").textContent = "Play";
  }
  function play() {
    if (at >= 1) show(0);
    const lasts = LASTS / +$("speed").value;
    let before = performance.now();
    $("play").textContent = "Pause";
    const tick = (now) => {
      show(at + Math.max(0, now - before) / lasts);
      before = now;
      flight = at < 1 ? requestAnimationFrame(tick) : 0;
      if (!flight) stop();
    };
    flight = requestAnimationFrame(tick);
  }
  const toggle = () => (playing() ? stop() : play());
  const go = (share) => { stop(); show(share); };

  $("play").onclick = toggle;
  $("seek").oninput = (event) => go(+event.target.value / 1000);
  $("speed").onchange = () => { if (playing()) { stop(); play(); } };
  document.querySelectorAll(".gantt .lanes").forEach((lanes) => {
    lanes.onclick = (event) => {
      const box = lanes.getBoundingClientRect();
      go(((event.clientX - box.left) / box.width) * (+lanes.closest(".gantt").dataset.end / end));
    };
  });
  addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target === $("seek")) return;
    const keys = { ArrowLeft: () => go(at - 0.01), ArrowRight: () => go(at + 0.01), Home: () => go(0), End: () => go(1) };
    if (event.key in keys) keys[event.key]();
    else if (event.key === " " && !event.target.closest?.("button, select, summary")) toggle();
    else return;
    event.preventDefault();
  });
  explain(() => drawn);
  $("player").hidden = false;
  show(0);
})();
