"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const svg = $("figure").querySelector("svg");
  const layer = svg.querySelector(".arrows");
  const { ranks, cards, nodes, messages, state, fill, explain, chunksOf, onCurve, treeOf, round1 } = cellsOf(data, svg);
  const last = data.rounds.length;
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const REST = 1300, IN = 380, OUT = 480;
  let now = 0, timer = 0, flight = 0, landing = null, drawn = null;

  // ---- vertices

  explain(() => state(now));
  nodes.forEach((group, node) => {
    const vertex = cards[node][0];
    const mark = (on) => {
      svg.classList.toggle("focused", on);
      layer.querySelectorAll(".arrow").forEach((arrow) =>
        arrow.classList.toggle("hot", on && [+arrow.dataset.src, +arrow.dataset.dst].includes(vertex)));
    };
    group.onpointerenter = () => mark(true);
    group.onpointerleave = () => mark(false);
  });

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
    const spot = labelled ? free(link, at, 7 * text.length + 26, 19, taken) : thin ? free(link, 0.3, 8 * text.length, 14, taken) : null;
    const mini = thin && spot !== null, rest = spot ?? (labelled ? at : 0.3);
    const dot = mini ? `<text class="mini">${text}</text>` : look === "dense" ? "" : '<circle class="dot" r="3.5"/>';
    const colour = look && src < ranks ? ` style="--add:${data.colours[src]};--copy:${data.colours[src]}"` : "";
    const tree = data.trees > 1 ? ` tree${treeOf(node)}` : "";
    return `<g class="arrow ${adds ? "add" : "copy"}${look ? ` thin ${look}` : ""}${tree}" data-src="${src}" data-dst="${dst}"${colour}>` +
      `<path class="line" d="M${ax} ${ay}Q${cx} ${cy} ${bx} ${by}"/><path class="head" d="M${head.map((point) => point.map(round1).join(" ")).join("L")}Z"/>` +
      `<g class="pill" data-rest="${rest}" transform="translate(${onCurve(link, rest).map(round1).join(" ")})">` +
      `${labelled && spot !== null ? full : `${dot}<g class="late">${full}</g>`}</g></g>`;
  }

  // Where on its arrow a label covers neither a disc nor another label, near `at` if it can; null: nowhere.
  function free(link, at, wide, high, taken) {
    for (const t of [at, 0.3, 0.36, 0.24, 0.42, 0.48, 0.54, 0.6, 0.66, 0.18, 0.72]) {
      const [x, y] = onCurve(link, t), [left, top, right, bottom] = [x - wide / 2, y - high / 2, x + wide / 2, y + high / 2];
      if (taken.some(([a, b, c, d]) => left < c && a < right && top < d && b < bottom)) continue;
      taken.push([left, top, right, bottom]);
      return t;
    }
    return null;
  }

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
    const name = data.names[frame];
    svg.setAttribute("aria-label", `${document.title}: ${name.toLowerCase()}. ${data.captions[frame]}`);
    $("name").textContent = name;
    $("caption").textContent = data.captions[frame];
    $("seek").value = frame;
    $("seek").setAttribute("aria-valuetext", name);
    $("back").disabled = frame === 0;
    $("next").disabled = frame === last;
    document.querySelectorAll("li.current").forEach((item) => item.classList.remove("current"));
    $(`words-${frame}`)?.classList.add("current");
    let after = 0;  // the rounds of this phase and those before it
    for (const phase of $("phases").children) {
      const from = after;
      after += +phase.style.flexGrow;
      phase.classList.toggle("current", from <= frame && frame < after);
    }
    history.replaceState(null, "", `#round=${frame + 1}`);
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
  document.querySelectorAll("#words li").forEach((item) => (item.onclick = () => go(item.value - 1)));
  addEventListener("keydown", (event) => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const keys = { ArrowLeft: () => move(-1), ArrowRight: () => move(1), Home: () => go(0), End: () => go(last) };
    if (event.key in keys && event.target !== $("seek")) keys[event.key]();
    else if (event.key === " " && !event.target.closest?.("button, summary")) toggle();
    else return;
    event.preventDefault();
  });

  const asked = () => { const found = /round=(\d+)/.exec(location.hash); return found ? Math.max(0, Math.min(last, found[1] - 1)) : 0; };
  addEventListener("hashchange", () => go(asked()));
  document.documentElement.classList.add("scripted");
  $("controls").hidden = $("keys").hidden = last === 0;
  if (last > 8 || ranks > 8) $("words").open = false;
  show(asked());
})();
