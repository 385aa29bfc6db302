// The page: what is told goes to where it is shown, and one choice (a step, a rank) is kept in the address.

import { Run, unpack } from "./data.js";
import { Heat, palette } from "./heat.js";
import { Lines } from "./lines.js";
import { chainFigure } from "./chain.js";
import { Ring } from "./ring.js";
import { byId, duration, element, put, signedPercent, unbroken } from "./words.js";

const FEW_ROWS = 16;
const LEAST_EXCESS = 0.05; // the scale of the bars reaches at least so far: noise stays small
const choice = { step: null, rank: null };
let figures = null, mesh = null, state = null, ofRank = null, showAll = false, announced = "", linked = false, asked = 0;

const hidden = (rows) => {
  const kept = (rows.hidden ??= { number: -1 });
  if (kept.number !== rows.number) {
    const { sync, exposed } = rows.lines, values = new Float32Array(rows.count);
    for (let i = 0; i < rows.count; i++) values[i] = Math.max(sync[i] - exposed[i], 0);
    Object.assign(kept, { number: rows.number, values });
  }
  return kept.values;
};
const hover = (row, event, chart) => {
  for (const one of charts) one.at(row);
  if (row === null) return hide();
  const rows = run.rows;
  tip(event, `step ${rows.steps[row].toLocaleString("en")}`, chart.values(row));
};
// One range of steps for the map and all charts: what is selected in one of them is shown in all.
const view = {
  range: () => heat.x,
  show: (from, to) => heat.view(from, to),
  all: () => heat.fit(),
  mark: (range) => { for (const chart of charts) chart.mark(range); },
};
const charts = [
  new Lines(byId("of-rank"), byId("key-rank"), [
    { name: "own", kind: "area", colour: "s0", of: (_, extra) => extra?.own },
    { name: "wait", kind: "area", colour: "wait", of: (_, extra) => extra?.wait },
    { name: "wire", kind: "line", colour: "wire", of: (_, extra) => extra?.wire },
  ], { title: "The chosen rank over time", onHover: hover, view }),
  new Lines(byId("of-all"), byId("key-all"), [
    { name: "5–95%", kind: "band", colour: "s0", of: (rows) => [rows.lines.own_low, rows.lines.own_high] },
    { name: "median", kind: "line", colour: "s0", of: (rows) => rows.lines.own },
    { name: "slowest rank", kind: "line", colour: "bad", of: (rows) => rows.lines.own_most },
  ], { title: "Own time of all ranks", onHover: hover, view }),
  new Lines(byId("of-overlap"), byId("key-overlap"), [
    { name: "exposed", kind: "area", colour: "bad", of: (rows) => rows.lines.exposed },
    { name: "hidden", kind: "area", colour: "wire", of: hidden },
    { name: "backward", kind: "line", colour: "ink", dash: true, of: (rows) => rows.lines.backward },
  ], { title: "Communication behind backward", onHover: hover, view }),
  new Lines(byId("of-wait"), byId("key-wait"), [
    { name: "wait, median rank", kind: "line", colour: "wait", bold: true, of: (rows) => rows.lines.wait },
    { name: "wire, median rank", kind: "line", colour: "wire", bold: true, of: (rows) => rows.lines.wire },
  ], { title: "Wait and wire", onHover: hover, view }),
];
const heat = new Heat(byId("heat"), {
  onView: (x) => {
    for (const [index, chart] of charts.entries()) chart.show(run.rows, x, index ? null : ofRank);
    byId("follow").setAttribute("aria-pressed", String(heat.following));
  },
  onHover: (at, event) => {
    for (const chart of charts) chart.at(at ? at.row : null);
    if (!at) return hide();
    tip(event, `rank ${at.rank}, step ${at.step.toLocaleString("en")}`, told(at.row, at.rank));
  },
  onSelect: (step, rank) => choose(step, rank),
});
const ring = new Ring(byId("ring"), byId("waits"), { onSelect: (rank) => choose(choice.step, rank) });
const run = new Run({
  onState: (told) => { state = told; tellState(); },
  onRows: () => rowsCame(),
  onReset: () => { ofRank = null; announced = ""; heat.show(run.rows); },
  onLink: (up) => { linked = up; tellPill(); },
});
Object.assign(window, { ringside: { run, heat, charts } }); // for tests, and for the curious

function told(row, rank) {
  const { lines, worst } = run.rows, late = run.rows.late(row, rank);
  const own = Number.isFinite(late) ? lines.own[row] * (1 + late) : NaN;
  return [
    ...(placeOf(rank) ? [["place", placeOf(rank)]] : []),
    ["above the median", late >= 1 ? "+100% or more" : late ? signedPercent(late) : Number.isFinite(late) ? "not at all" : "–"],
    ["own time", late > 0 && late < 1 ? `≈ ${duration(own)}` : late >= 1 ? `≥ ${duration(own)}` : Number.isFinite(late) ? `≤ ${duration(lines.own[row])}` : "–"],
    ["median of all", duration(lines.own[row])],
    ["step", duration(lines.step[row])],
    ["slowest", worst[row] < 0 ? "–" : `rank ${worst[row]}, ${duration(lines.own_most[row])}`],
  ];
}

function tip(event, title, pairs) {
  const box = byId("heat").parentElement.getBoundingClientRect(), made = byId("tip");
  put(made, element("b", {}, title), ...pairs.map(([name, text]) => element("div", {}, element("span", {}, name), element("span", {}, text))));
  made.hidden = false;
  const left = event.clientX - box.left + 14, top = event.clientY - box.top + 14;
  const most = document.documentElement.clientWidth - box.left - made.offsetWidth - 12;
  made.style.transform = `translate(${Math.max(Math.min(left, most), 0)}px, ${top}px)`;
}

function hide() {
  byId("tip").hidden = true;
}

function rowsCame() {
  if (run.rows.count) document.body.classList.remove("waiting");
  heat.show(run.rows);
  if (choice.rank === null) guess();
  askRank();
  reading();
  heat.hooks.onView(heat.x);
}

// Before anybody has chosen, the rank shown is the culprit, or else the slowest one now.
function guess() {
  const rank = choice.rank ?? state?.verdicts.find((verdict) => verdict.ranks.length)?.ranks[0] ?? slowest();
  byId("rank").value = rank;
  return rank;
}

function slowest() {
  let found = 0;
  figures?.excess.forEach((value, rank) => { if (value > (figures.excess[found] || 0)) found = rank; });
  return found;
}

async function askRank() {
  const rank = guess();
  if (ofRank?.rank === rank && (ofRank.number === run.rows.number || performance.now() - asked < 1500)) return;
  asked = performance.now();
  const number = run.rows.number, answer = await run.ofRank(rank).catch(() => null);
  if (!answer || rank !== guess()) return;
  ofRank = { ...aligned(answer), rank, number };
  heat.hooks.onView(heat.x);
}

// The rows of the map and those of a rank may have come at different times.
function aligned(answer) {
  const { steps, count } = run.rows, found = { own: new Float32Array(count).fill(NaN), wait: new Float32Array(count).fill(NaN), wire: new Float32Array(count).fill(NaN) };
  for (let i = 0, row = 0; i < answer.steps.length && row < count; ) {
    if (answer.steps[i] < steps[row]) i++;
    else if (answer.steps[i] > steps[row]) row++;
    else { for (const name of Object.keys(found)) found[name][row] = answer[name][i]; i++; row++; }
  }
  return found;
}

function choose(step, rank, { keep = true } = {}) {
  if (!run.rows.count && step !== null) { [choice.step, choice.rank] = [step, rank]; return; }
  choice.rank = Math.min(Math.max(rank ?? guess(), 0), Math.max(run.rows.ranks - 1, 0));
  choice.step = step ?? run.rows.steps[run.rows.count - 1] ?? null;
  if (choice.step !== null) {
    heat.select(choice.step, choice.rank);
    for (const chart of charts) chart.at(run.rows.nearest(choice.step));
  }
  byId("rank").value = choice.rank;
  if (keep) history.replaceState(null, "", `#step=${choice.step}&rank=${choice.rank}`);
  askRank();
  reading();
  tellRanks();
  tellRing();
}

function fromAddress() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const [step, rank] = ["step", "rank"].map((name) => (asked.has(name) && /^\d+$/.test(asked.get(name)) ? Number(asked.get(name)) : null));
  if (step !== null || rank !== null) choose(step, rank, { keep: false });
}

function reading() {
  if (choice.step === null || !run.rows.count) return;
  const row = run.rows.nearest(choice.step);
  if (heat.selected === null || heat.selected.step !== choice.step) heat.select(choice.step, choice.rank);
  const words = told(row, choice.rank).map(([name, text]) => `${name} ${text}`).join(", ");
  byId("reading").textContent = `Rank ${choice.rank}, step ${run.rows.steps[row].toLocaleString("en")}: ${words}.`;
}

function tellState() {
  const { name, ranks, hosts = [], engine = "", algorithm = "", step, steps: recorded, of, trouble } = state;
  document.title = `${state.verdicts.some((verdict) => !verdict.over) ? "! " : ""}${name || "waiting"} · Ringside`;
  byId("run").textContent = name || "waiting for the run";
  const places = `${ranks} rank${ranks === 1 ? "" : "s"} on ${hosts.length || 1} host${hosts.length > 1 ? "s" : ""}`;
  const planned = of ? ` of at most ${of.toLocaleString("en")}` : "";
  // A record that begins in the middle of a training: how many steps there are, and which.
  const which = step >= recorded ? ` (steps ${(step - recorded + 1).toLocaleString("en")} to ${step.toLocaleString("en")}${planned})` : planned;
  const steps = step >= 0 ? `${recorded.toLocaleString("en")} step${recorded === 1 ? "" : "s"}${which}` : "no step yet";
  byId("meta").textContent = name ? [steps, places, algorithm ? `${engine}, ${algorithm}` : engine].join(" · ") : "";
  byId("trouble").hidden = !trouble;
  byId("trouble").textContent = trouble;
  figures = state.figures?.own_seconds ? {
    own: unpack.f32(state.figures.own_seconds), wait: unpack.f32(state.figures.wait_seconds),
    wire: unpack.f32(state.figures.wire_seconds), excess: unpack.f32(state.figures.excess_ratio),
    host: unpack.i32(state.host_of),
  } : null;
  readMesh();
  if (step < 0) document.body.classList.add("waiting");
  tellPill();
  tellVerdicts();
  tellNotes();
  tellTiles();
  tellRing();
  tellRanks();
  tellBlocked();
  tellLinks();
  tellQuestions();
  heat.episodes = state.verdicts.filter((verdict) => verdict.kind !== "slow_link").map(({ since_step: since, until_step: until, ranks }) => ({ since, until: until ?? null, ranks }));
  heat.draw();
}

// Where a rank is in the mesh: "dp 1, tp 0"; empty where that is not known.
function placeOf(rank) {
  const { names, places } = mesh ?? { names: [] };
  return names.map((name, index) => [name, places[rank * names.length + index]]).filter(([, at]) => at >= 0).map(([name, at]) => `${name} ${at}`).join(", ");
}

function readMesh() {
  const told = state.mesh;
  mesh = told ? { names: told.dimensions, places: unpack.i32(told.coordinates), order: unpack.i32(told.order), parts: told.parts, partOf: unpack.i32(told.part_of) } : null;
  heat.arrange(mesh?.order ?? null);
}

function tellPill() {
  const words = { live: "live", ended: "ended", quiet: "ended", stalled: "no step for a while", waiting: "waiting", reading: "reading" };
  const pill = byId("state");
  pill.textContent = !linked ? "reconnecting" : words[state?.state] ?? "connecting";
  pill.className = `pill ${linked ? state?.state ?? "" : "off"}`;
}

function tellVerdicts() {
  const box = byId("verdicts"), { verdicts } = state;
  const wanted = verdicts.length ? verdicts.map((verdict) => `${verdict.kind} ${verdict.ranks} ${verdict.since_step} ${verdict.over}`).join("; ") : `none ${calm()}`;
  if (box.dataset.shown !== wanted) put(box, ...(verdicts.length ? verdicts.map(verdictCard) : [calmCard()]));
  box.dataset.shown = wanted;
  box.querySelectorAll(".verdict").forEach((card, index) => {
    for (const name of ["headline", "when", "why", "price", "next"]) {
      const place = card.querySelector(`[data-name=${name}]`), text = verdicts[index]?.[name];
      if (place && text !== undefined && place.textContent !== unbroken(text)) place.textContent = unbroken(text);
    }
  });
  const words = box.querySelector("[data-name=calm]");
  if (words) words.textContent = calmWords();
  const said = verdicts.filter((verdict) => !verdict.over).map((verdict) => `${verdict.kind} ${verdict.ranks}`).join("; ");
  if (said !== announced) {
    byId("announce").textContent = said ? verdicts.filter((verdict) => !verdict.over).map((verdict) => verdict.headline).join(" ") : "All verdicts are resolved.";
    announced = said;
  }
}

function verdictCard(verdict, index) {
  const card = element("section", { class: `verdict bad${verdict.over ? " over" : ""}`, "aria-label": "Verdict" });
  const sign = element("p", { class: "sign" }, element("span", { "aria-hidden": "true" }, verdict.over ? "✓" : "!"), `verdict · ${verdict.kind.replaceAll("_", " ")}${verdict.over ? " · over" : ""}`);
  const list = element("dl");
  for (const [name, key] of [["Why", "why"], ["Cost", "price"], ["Next", "next"]]) {
    if (verdict[key]) list.append(element("dt", {}, name), element("dd", { "data-name": key, class: key }, unbroken(verdict[key])));
  }
  card.append(sign, element(index ? "h2" : "h1", { "data-name": "headline" }, unbroken(verdict.headline)), element("p", { class: "when", "data-name": "when" }, verdict.when), list);
  if (verdict.chain) card.append(chainFigure(verdict.chain, verdict.by_way_of, placeOf));
  if (verdict.ranks.length) {
    const go = element("button", { type: "button", class: "go" }, "Show it on the map");
    go.addEventListener("click", () => {
      choose(verdict.since_step, verdict.ranks[0]);
      byId("heat").scrollIntoView({ block: "center", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
      byId("heat").focus({ preventScroll: true });
    });
    card.append(go);
  }
  return card;
}

function calm() {
  if (state.state === "reading") return "Reading what this run has recorded.";
  if (!state.ranks) return state.trouble ? "This run cannot be shown." : "Waiting for the run’s first steps.";
  if (state.calm) return state.calm[0];
  return state.step < 12 ? "Too few steps for a verdict." : `No straggler ${state.state === "live" ? "so far" : "detected"}.`;
}

function calmWords() {
  if (state.calm) return unbroken(state.calm[1]);
  if (!calm().startsWith("No straggler") || !(figures?.excess.length > 1)) return "";
  const rank = slowest(), open = state.undecided ? ` The detector: ${state.undecided}.` : "";
  return `Rank ${rank} is slowest now: its own time is ${signedPercent(figures.excess[rank]).slice(1)} above the median of the others’ (${state.window}).${open}`;
}

function calmCard() {
  const headline = calm(), sure = state.calm?.[2];
  const card = element("section", { class: `verdict ${sure ? "well" : "open"}`, "aria-label": "Verdict" });
  card.append(element("p", { class: "sign" }, element("span", { "aria-hidden": "true" }, sure ? "✓" : "…"), "verdict"), element("h1", {}, headline));
  if (headline.startsWith("Waiting")) card.append(element("p", {}, "Its directory has no run.json yet: that comes with the first step of a DistributedDataParallel model."));
  card.append(element("p", { "data-name": "calm" }, calmWords()));
  return card;
}

function tellNotes() {
  const notes = state.notes ?? [];
  byId("notecard").hidden = !notes.length;
  put(byId("notes"), ...notes.map((words) => element("li", {}, unbroken(words))));
}

function tellTiles() {
  put(byId("tiles"), ...state.tiles.map(([name, value, more], index) => element("div", index === 0 && value !== "nothing" ? { class: "bad" } : {},
    element("dt", {}, name), element("dd", {}, value, element("small", {}, more)))));
}

function culprits() {
  return new Set(state.verdicts.filter((verdict) => !verdict.over && verdict.kind !== "slow_link").flatMap((verdict) => verdict.ranks));
}

function tellRing() {
  if (!state?.ranks || !figures) return;
  ring.show({ ranks: state.ranks, arrows: state.arrows, topology: state.topology, culprits: culprits(), chosen: choice.rank, excess: figures.excess, step: state.step_seconds });
  byId("ringnote").textContent = `Arrows point from who waits to whom they wait for: mean per step, ${state.arrows_window}.`;
}

function tellRanks() {
  if (!figures) return;
  const bad = culprits(), count = figures.own.length;
  const slowestFirst = (a, b) => (bad.has(b) - bad.has(a)) || ((figures.excess[b] || 0) - (figures.excess[a] || 0)) || a - b;
  const order = Array.from({ length: count }, (_, rank) => rank).sort(slowestFirst);
  const whole = mesh && (showAll || count <= FEW_ROWS), among = mesh ? "; excess is over the median of those that do the same work" : "";
  byId("ranktitle").textContent = state.window === "whole run" ? "Ranks" : "Ranks now";
  byId("ranknote").textContent = `Medians, ${state.window}, ${whole ? "beside those that do the same work" : "the slowest first"}${among}.`;
  byId("placehead").hidden = !mesh;
  const known = figures.excess.filter(Number.isFinite), span = [Math.min(...known, 0), Math.max(...known, LEAST_EXCESS)];
  put(byId("ends"), ...span.map((value) => element("span", {}, value ? signedPercent(value) : "0")));
  const shown = showAll ? order : order.slice(0, FEW_ROWS), row = (rank) => rankRow(rank, bad.has(rank), span);
  put(byId("rows"), ...(whole ? blocks(order).flatMap(([part, ranks]) => [...part, ...ranks.map(row)]) : shown.map(row)));
  byId("all").hidden = count <= FEW_ROWS;
  byId("all").textContent = showAll ? `Show the slowest ${FEW_ROWS}` : `Show all ${count.toLocaleString("en")} ranks`;
}

// Ranks beside those that do the same work, each block below a line that says which: few as the mesh has them, of many
// the slowest with its peers first.
function blocks(slowestFirst) {
  const found = new Map();
  for (const rank of slowestFirst.length <= FEW_ROWS ? mesh.order : slowestFirst) {
    const part = mesh.parts[mesh.partOf[rank]];
    found.set(part, [...(found.get(part) ?? []), rank]);
  }
  const named = found.size > 1 && found.size < slowestFirst.length;
  return Array.from(found, ([part, ranks]) => {
    const words = `${part}: ${ranks.length} rank${ranks.length === 1 ? "" : "s"}`;
    return [named ? [element("tr", { class: "part" }, element("th", { scope: "rowgroup", colspan: 8 }, words))] : [], ranks];
  });
}

// Its bar begins at the median of the others: left of it a rank is faster, right of it slower.
function rankRow(rank, culprit, [least, most]) {
  const bar = element("span", { class: "bar" }), excess = figures.excess[rank] || 0;
  const share = (value) => (100 * (value - least)) / (most - least);
  bar.style.left = `${share(Math.min(excess, 0)).toFixed(1)}%`;
  bar.style.width = `${((100 * Math.abs(excess)) / (most - least)).toFixed(1)}%`;
  const zero = element("span", { class: "zero" });
  zero.style.left = `${share(0).toFixed(1)}%`;
  const row = element("tr", { class: [culprit ? "culprit" : "", rank === choice.rank ? "chosen" : ""].join(" ").trim() },
    element("th", { scope: "row" }, String(rank), ...(culprit ? [element("span", { class: "badge" }, "verdict")] : [])),
    ...(mesh ? [element("td", { class: "text" }, placeOf(rank))] : []),
    element("td", { class: "text" }, state.hosts[figures.host[rank]] ?? ""),
    element("td", {}, duration(figures.own[rank])), element("td", {}, signedPercent(figures.excess[rank])),
    ...["wait", "wire"].map((name) => element("td", {}, duration(figures[name][rank]))), element("td", { class: "wide", "aria-hidden": "true" }, element("span", { class: "track" }, zero, bar)));
  row.addEventListener("click", () => choose(choice.step, rank));
  return row;
}

function tellBlocked() {
  const blocked = state.blocked ?? [];
  byId("blockedcard").hidden = !blocked.length;
  byId("blockednote").textContent = `Medians, ${state.window}.`;
  put(byId("blocked"), ...blocked.map(({ cells: [name, ...cells] }) => element("tr", {},
    element("th", { scope: "row" }, name), ...cells.map((cell) => element("td", {}, unbroken(cell))))));
}

function tellLinks() {
  const { links } = state, slow = new Set(state.verdicts.filter((verdict) => verdict.kind === "slow_link").map((verdict) => verdict.ranks.join()));
  byId("linkcard").hidden = !links.length;
  put(byId("links"), ...links.map((link) => {
    const named = slow.has(`${link.src},${link.dst}`);
    return element("tr", named ? { class: "culprit" } : {},
      element("th", { scope: "row" }, `${link.src} → ${link.dst}`, ...(named ? [element("span", { class: "badge" }, "verdict")] : [])),
      element("td", { class: "text" }, link.hosts), ...["rate", "sent", "wire", "ratio", "again"].map((name) => element("td", {}, link[name])));
  }));
}

function tellQuestions() {
  byId("questioncard").hidden = !state.questions.length;
  const kinds = { "✓": ["well", "passed"], "!": ["bad", "failed"], "?": ["open", "not judged"] };
  put(byId("questions"), ...state.questions.map((one) => element("li", { class: kinds[one.mark][0] },
    element("b", { title: kinds[one.mark][1] }, one.mark),
    element("div", {}, element("h3", {}, one.heading), element("p", { class: "words" }, one.caption)))));
}

function move(rows, lines) {
  if (!run.rows.count) return;
  const at = (choice.step === null ? run.rows.count - 1 : run.rows.nearest(choice.step)) + rows;
  choose(run.rows.steps[Math.min(Math.max(at, 0), run.rows.count - 1)], heat.rankOf(Math.min(Math.max(heat.lineOf(choice.rank ?? guess()) + lines, 0), run.rows.ranks - 1)));
}

const keys = {
  ArrowLeft: (fast) => move(fast ? -10 : -1, 0), ArrowRight: (fast) => move(fast ? 10 : 1, 0),
  ArrowUp: (fast) => move(0, fast ? -10 : -1), ArrowDown: (fast) => move(0, fast ? 10 : 1),
  Home: () => move(-Infinity, 0), End: () => move(Infinity, 0),
  "+": () => heat.zoom(0.5), "=": () => heat.zoom(0.5), "-": () => heat.zoom(2), 0: () => heat.fit(), Escape: () => heat.fit(), l: () => heat.follow(), L: () => heat.follow(),
};

function pressed(event) {
  const act = event.ctrlKey || event.metaKey || event.altKey ? null : keys[event.key];
  if (!act) return false;
  event.preventDefault();
  act(event.shiftKey);
  return true;
}

byId("heat").addEventListener("keydown", pressed);
for (const chart of charts) {
  const { canvas } = chart;
  canvas.addEventListener("keydown", (event) => {
    if (!pressed(event) || choice.step === null) return hide();
    const row = run.rows.nearest(choice.step), box = canvas.getBoundingClientRect();
    hover(row, { clientX: box.left + chart.place(row + 0.5), clientY: box.top }, chart);
  });
  canvas.addEventListener("blur", hide);
}
byId("heat").addEventListener("focus", () => byId("reading").setAttribute("aria-live", "polite"));
byId("heat").addEventListener("blur", () => byId("reading").setAttribute("aria-live", "off"));
byId("in").addEventListener("click", () => heat.zoom(0.5));
byId("out").addEventListener("click", () => heat.zoom(2));
byId("fit").addEventListener("click", () => heat.fit());
byId("follow").addEventListener("click", () => heat.follow());
byId("rank").addEventListener("change", (event) => { if (event.target.value !== "") choose(choice.step, Number(event.target.value)); });
byId("all").addEventListener("click", () => { showAll = !showAll; tellRanks(); });
if (location.pathname.includes("/run/")) { byId("runs").href = "../../runs"; byId("dashboard").href = "../../grafana.json"; }
addEventListener("hashchange", fromAddress);

function scale() {
  const canvas = byId("scale"), context = canvas.getContext("2d"), image = context.createImageData(canvas.width, 1);
  const shades = palette(matchMedia("(prefers-color-scheme: dark)").matches), pixels = new Uint32Array(image.data.buffer);
  for (let x = 0; x < canvas.width; x++) pixels[x] = shades[1 + Math.round((254 * x) / (canvas.width - 1))];
  for (let y = 0; y < canvas.height; y++) context.putImageData(image, 0, y);
}
scale();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", scale);
fromAddress();
