"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const svg = $("figure").querySelector("svg");
  const layer = svg.querySelector(".arrows");
  const last = data.frames.length - 1;
  const cells = [...svg.querySelectorAll(".rank")].map((rank) => [...rank.querySelectorAll(".cell")]);
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const REST = 1300, IN = 380, OUT = 480;
  let now = 0, timer = 0, flight = 0, landing = null;

  // What every cell holds in a frame: the latest change up to it.
  function contents(frame) {
    const found = new Map();
    for (let k = 0; k <= frame; k++) for (const cell of data.frames[k].cells) found.set(cell[0] * data.chunks + cell[1], cell);
    return found.values();
  }

  function fill([rank, chunk, members, state]) {
    const cell = cells[rank][chunk];
    const key = members + state;
    if (cell.dataset.key === key) return;
    const first = cell.dataset.key === undefined;
    cell.dataset.key = key;
    cell.setAttribute("class", `cell ${state}${first ? "" : " fresh"}`);
    const held = [...members].flatMap((bit, r) => (bit === "1" ? [r] : []));
    cell.querySelectorAll(".part").forEach((part, r) => part.classList.toggle("on", members[r] === "1"));
    const level = cell.querySelector(".level");
    if (level) level.style.transform = `scaleY(${held.length / data.ranks})`;
    const what = held.length === data.ranks && held.length > 1 ? "the sum of all ranks" : held.map((r) => `x${r}`).join(" + ");
    cell.querySelector("title").textContent = `rank ${rank}, chunk ${chunk}: ${what}`;
  }

  function show(frame, moving = false) {
    cancelAnimationFrame(flight);
    clearTimeout(landing?.timer);
    landing = null;
    now = frame;
    for (const cell of contents(frame)) fill(cell);
    layer.innerHTML = data.frames[frame].arrows;
    svg.setAttribute("aria-label", `${document.title}: ${data.frames[frame].name}`);
    $("name").textContent = data.frames[frame].name;
    $("caption").textContent = data.frames[frame].caption;
    $("seek").value = frame;
    $("seek").setAttribute("aria-valuetext", data.frames[frame].name);
    $("back").disabled = frame === 0;
    $("next").disabled = frame === last;
    document.querySelectorAll("li.current").forEach((item) => item.classList.remove("current"));
    $(`words-${frame}`)?.classList.add("current");
    history.replaceState(null, "", `#round=${frame}`);
    if (moving && !still.matches) fly(0, null, IN);
  }

  // Move every label along its arrow, from `from` to `to` (null: where it rests). Only looks; see `land`.
  function fly(from, to, ms) {
    const labels = [...layer.querySelectorAll(".arrow")].flatMap((arrow) => {
      const pill = arrow.querySelector(".pill");
      if (!pill) return [];
      const line = arrow.querySelector(".line"), length = line.getTotalLength();
      const rest = pill.dataset.rest ? +pill.dataset.rest : nearest(line, length, pill);
      pill.dataset.rest = rest;
      return [{ pill, line, length, from: from ?? rest, to: to ?? rest }];
    });
    const start = performance.now();
    const tick = (time) => {
      const share = Math.min(1, Math.max(0, (time - start) / ms)), eased = share * share * (3 - 2 * share);
      for (const { pill, line, length, from, to } of labels) {
        const at = line.getPointAtLength((from + (to - from) * eased) * length);
        pill.setAttribute("transform", `translate(${at.x} ${at.y})`);
      }
      if (share < 1) flight = requestAnimationFrame(tick);
    };
    cancelAnimationFrame(flight);
    tick(start);
  }

  function nearest(line, length, pill) {
    const [, x, y] = pill.getAttribute("transform").match(/(-?[\d.]+) (-?[\d.]+)/).map(Number);
    let best = 0.5, least = Infinity;
    for (let t = 0; t <= 1; t += 0.02) {
      const at = line.getPointAtLength(t * length), off = Math.hypot(at.x - x, at.y - y);
      if (off < least) [best, least] = [t, off];
    }
    return best;
  }

  // One round forward: its messages fly, and when they land the next round is shown.
  function advance(then) {
    const target = now + 1;
    const arrive = () => { show(target, true); then?.(); };
    if (still.matches || !layer.querySelector(".pill")) return arrive();
    fly(null, 1, OUT);
    landing = { arrive, timer: setTimeout(land, OUT) };
  }
  function land() {
    landing?.arrive();
  }

  const playing = () => timer !== 0;
  function stop() {
    clearTimeout(timer);
    timer = 0;
    $("play").textContent = "Play";
  }
  function schedule() {
    timer = setTimeout(() => advance(() => { if (playing()) now === last ? stop() : schedule(); }), REST);
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
  svg.querySelectorAll(".rank").forEach((rank) => {
    const mark = (on) => {
      svg.classList.toggle("focused", on);
      layer.querySelectorAll(".arrow").forEach((arrow) =>
        arrow.classList.toggle("hot", on && [arrow.dataset.src, arrow.dataset.dst].includes(rank.dataset.rank)));
    };
    rank.onpointerenter = () => mark(true);
    rank.onpointerleave = () => mark(false);
  });

  const asked = () => { const found = /round=(\d+)/.exec(location.hash); return found ? Math.min(last, +found[1]) : 0; };
  addEventListener("hashchange", () => go(asked()));
  document.documentElement.classList.add("scripted");
  $("controls").hidden = $("keys").hidden = last === 0;
  if (last > 8 || data.ranks > 8) $("words").open = false;
  show(asked());
})();
