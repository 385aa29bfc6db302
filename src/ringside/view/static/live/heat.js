// The map of ranks × steps. What was drawn once is kept as pictures of 256 steps, at every zoom; a frame only places them.
// `ticks` is brush.js's, which the page loads before.

import { colours } from "./words.js";

const TILE = 256;
const TILES_KEPT = 256;
const LEFT = 46;
const BOTTOM = 24;
const TOP = 4;
const LIGHT = [[0, 0xf6f3ec], [0.16, 0xf1e8d3], [0.36, 0xf0c878], [0.56, 0xe58a3c], [0.78, 0xbd3f1a], [1, 0x5f0f14]];
const DARK = [[0, 0x1f2227], [0.16, 0x2c2a2b], [0.36, 0x5f3a22], [0.56, 0xb9541f], [0.78, 0xff9450], [1, 0xfff2d0]];

export function palette(dark) {
  const stops = dark ? DARK : LIGHT, found = new Uint32Array(256);
  for (let code = 1; code < 256; code++) {
    const at = (code - 1) / 254;
    const next = Math.max(stops.findIndex(([edge]) => edge >= at), 1);
    const [[low, from], [high, to]] = [stops[next - 1], stops[next]];
    const mix = (shift) => {
      const a = (from >> shift) & 255, b = (to >> shift) & 255;
      return Math.round(a + ((b - a) * (at - low)) / (high - low));
    };
    found[code] = (255 << 24) | (mix(0) << 16) | (mix(8) << 8) | mix(16); // bytes are red, green, blue, alpha
  }
  return found;
}

export class Heat {
  constructor(canvas, { onView, onHover, onSelect }) {
    this.canvas = canvas;
    this.hooks = { onView, onHover, onSelect };
    this.rows = null;
    this.episodes = [];
    this.selected = null;
    this.order = null; // the rank of each line, and the line of each rank; null: they are the same
    this.lines = null;
    this.x = { from: 0, to: 1 };
    this.y = { from: 0, to: 1 };
    this.following = true;
    this.tiles = new Map();
    this.frames = [];
    this.dirty = false;
    this.colour();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.colour(); this.draw(); });
    new ResizeObserver(() => this.draw()).observe(canvas);
    this.listen();
  }

  colour() {
    this.dark = matchMedia("(prefers-color-scheme: dark)").matches;
    this.palette = palette(this.dark);
    this.ink = colours(["ink", "soft", "faint", "rule", "bad", "card", "sel"]);
    this.tiles.clear();
  }

  show(rows) {
    if (rows !== this.rows) {
      this.rows = rows;
      this.tiles.clear();
      this.y = { from: 0, to: Math.max(rows.ranks, 1) };
      this.x = { from: 0, to: 1 };
      this.following = true;
      this.span = 0;
      this.canvas.style.height = `${Math.min(Math.max(rows.ranks * 22, 132), 460) + BOTTOM + TOP}px`;
    }
    for (const row of rows.changes.splice(0)) this.forget(row);
    if (this.following) this.end();
    this.draw();
  }

  // Lines in another order of ranks: beside each other those that do the same work.
  arrange(order) {
    if (String(order ?? "") === String(this.order ?? "")) return;
    this.order = order;
    this.lines = order && new Int32Array(order.length);
    order?.forEach((rank, line) => { this.lines[rank] = line; });
    this.tiles.clear();
    this.draw();
  }

  lineOf(rank) {
    return this.lines?.[rank] ?? rank;
  }

  rankOf(line) {
    return this.order?.[line] ?? line;
  }

  forget(row) {
    for (let level = 0; level < this.rows.levels.length; level++) {
      const tile = Math.floor((row >> level) / TILE);
      for (let pooled = 0; pooled < 8; pooled++) this.tiles.delete(`${level}/${pooled}/${tile}`);
    }
  }

  // Following: the newest step at the right end; all of them while nobody has zoomed in.
  end() {
    const count = Math.max(this.rows.count, 1);
    const span = this.span ? Math.min(this.span, count) : count;
    this.x = { from: count - span, to: count };
    this.hooks.onView(this.x);
  }

  get plot() {
    const { clientWidth: width, clientHeight: height } = this.canvas;
    return { left: LEFT, top: TOP, width: Math.max(width - LEFT, 1), height: Math.max(height - BOTTOM - TOP, 1) };
  }

  draw() {
    if (this.dirty) return;
    this.dirty = true;
    requestAnimationFrame(() => {
      this.dirty = false;
      const began = performance.now();
      this.paint();
      this.frames.push(performance.now() - began);
      if (this.frames.length > 1000) this.frames.splice(0, 500);
    });
  }

  paint() {
    const { canvas, rows } = this, ratio = Math.min(devicePixelRatio || 1, 2);
    const width = Math.round(canvas.clientWidth * ratio), height = Math.round(canvas.clientHeight * ratio);
    if (canvas.width !== width || canvas.height !== height) [canvas.width, canvas.height] = [width, height];
    const context = canvas.getContext("2d"), plot = this.plot;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
    if (!rows?.count || !rows.ranks) return;
    context.save();
    context.beginPath();
    context.rect(plot.left, plot.top, plot.width, plot.height);
    context.clip();
    this.paintTiles(context, plot, ratio);
    this.paintEpisodes(context, plot);
    this.paintSelected(context, plot);
    context.restore();
    this.paintAxes(context, plot);
  }

  paintTiles(context, plot, ratio) {
    const { rows, x, y } = this;
    const perStep = (plot.width * ratio) / (x.to - x.from), perRank = (plot.height * ratio) / (y.to - y.from);
    const top = Math.floor(Math.log2(Math.max(rows.count, 1)));
    const level = Math.min(Math.max(Math.ceil(-Math.log2(perStep)), 0), Math.max(top, 0), rows.levels.length - 1);
    const pooled = Math.min(Math.max(Math.ceil(-Math.log2(perRank)), 0), 7);
    const columns = rows.columns(level), wide = TILE << level;
    const first = Math.max(Math.floor(x.from / wide), 0), last = Math.min(Math.ceil(x.to / wide), Math.ceil(columns / TILE));
    context.imageSmoothingEnabled = false;
    const across = plot.width / (x.to - x.from), down = plot.height / (y.to - y.from);
    for (let tile = first; tile < last; tile++) {
      const picture = this.tile(level, pooled, tile);
      const steps = Math.min(wide, Math.max(rows.count - tile * wide, 0)); // the last picture may stand for fewer
      const part = steps / (1 << level);
      context.drawImage(
        picture, 0, 0, part, rows.ranks / (1 << pooled),
        plot.left + (tile * wide - x.from) * across, plot.top - y.from * down, steps * across, rows.ranks * down,
      );
    }
    this.grid(context, plot, across, down);
  }

  // Large cells are told apart by hair lines of the card's colour.
  grid(context, plot, across, down) {
    context.fillStyle = this.ink.card;
    const { x, y } = this;
    if (across >= 7) for (let step = Math.ceil(x.from); step <= x.to; step++) context.fillRect(plot.left + (step - x.from) * across - 0.5, plot.top, 1, plot.height);
    if (down >= 7) for (let rank = Math.ceil(y.from); rank <= y.to; rank++) context.fillRect(plot.left, plot.top + (rank - y.from) * down - 0.5, plot.width, 1);
  }

  tile(level, pooled, tile) {
    const key = `${level}/${pooled}/${tile}`, kept = this.tiles.get(key);
    if (kept) return kept;
    const { rows, palette, order } = this, ranks = rows.ranks, data = rows.levels[level];
    const columns = Math.min(TILE, rows.columns(level) - tile * TILE), lines = Math.ceil(ranks / (1 << pooled));
    const picture = document.createElement("canvas");
    [picture.width, picture.height] = [columns, lines];
    const image = new ImageData(columns, lines), pixels = new Uint32Array(image.data.buffer);
    for (let column = 0; column < columns; column++) {
      const start = (tile * TILE + column) * ranks;
      for (let line = 0; line < lines; line++) {
        let latest = 0;
        const end = Math.min((line + 1) << pooled, ranks);
        for (let at = line << pooled; at < end; at++) {
          const value = data[start + (order ? order[at] : at)];
          if (value > latest) latest = value;
        }
        pixels[line * columns + column] = palette[latest];
      }
    }
    picture.getContext("2d").putImageData(image, 0, 0);
    if (this.tiles.size >= TILES_KEPT) this.tiles.delete(this.tiles.keys().next().value);
    this.tiles.set(key, picture);
    return picture;
  }

  place(row, line) {
    const { x, y, plot } = this;
    return [
      plot.left + ((row - x.from) / (x.to - x.from)) * plot.width,
      plot.top + ((line - y.from) / (y.to - y.from)) * plot.height,
    ];
  }

  paintEpisodes(context, plot) {
    context.strokeStyle = this.ink.bad;
    context.lineWidth = 1.5;
    for (const { since, until, ranks } of this.episodes) {
      const from = this.rows.indexOf(since), to = until === null ? this.rows.count + 1e6 : this.rows.indexOf(until);
      for (const rank of ranks.slice(0, 64)) {
        const line = this.lineOf(rank), [left, top] = this.place(from, line), [right, bottom] = this.place(to, line + 1);
        const room = Math.max(6 - (bottom - top), 0) / 2;
        context.strokeRect(left, top - room, Math.max(right - left, 2), bottom - top + 2 * room);
      }
    }
  }

  paintSelected(context, plot) {
    if (!this.selected) return;
    const row = this.rows.nearest(this.selected.step), line = this.lineOf(this.selected.rank);
    const [left, top] = this.place(row, line), [right, bottom] = this.place(row + 1, line + 1);
    const middle = (left + right) / 2, centre = (top + bottom) / 2;
    context.strokeStyle = this.ink.sel;
    context.lineWidth = 1;
    context.globalAlpha = 0.55;
    context.beginPath();
    context.moveTo(middle, plot.top);
    context.lineTo(middle, plot.top + plot.height);
    context.moveTo(plot.left, centre);
    context.lineTo(plot.left + plot.width, centre);
    context.stroke();
    context.globalAlpha = 1;
    context.lineWidth = 2;
    context.strokeRect(Math.min(left, middle - 4), Math.min(top, centre - 4), Math.max(right - left, 8), Math.max(bottom - top, 8));
  }

  paintAxes(context, plot) {
    const { rows, x, y } = this;
    context.font = "12px ui-sans-serif, system-ui, sans-serif";
    context.fillStyle = this.ink.faint;
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const line of ticks(y.from, y.to - 0.01, plot.height / 20, 1)) {
      context.fillText(this.rankOf(line), plot.left - 8, Math.max(this.place(0, line + 0.5)[1], 7));
    }
    context.textBaseline = "alphabetic";
    const edge = plot.left + plot.width;
    for (const row of ticks(x.from, x.to - 0.01, plot.width / 90, 1)) {
      if (row >= rows.count) continue;
      const at = this.place(row + 0.5, 0)[0], text = rows.steps[row].toLocaleString("en");
      context.textAlign = at > edge - 24 ? "right" : "center";
      context.fillText(text, Math.min(at, edge), plot.top + plot.height + 17);
    }
    context.textAlign = "left";
    context.fillText("rank", 0, plot.top + plot.height + 17);
  }

  // The row and rank under a point of the page; null beside the plot.
  at(event) {
    const box = this.canvas.getBoundingClientRect(), { plot, x, y } = this;
    const across = (event.clientX - box.left - plot.left) / plot.width, down = (event.clientY - box.top - plot.top) / plot.height;
    if (!this.rows || !this.rows.count || across < 0 || across > 1 || down < 0 || down > 1) return null;
    const row = Math.floor(x.from + across * (x.to - x.from)), line = Math.floor(y.from + down * (y.to - y.from));
    if (row < 0 || row >= this.rows.count || line < 0 || line >= this.rows.ranks) return null;
    return { row, rank: this.rankOf(line), step: this.rows.steps[row] };
  }

  view(from, to, top = this.y.from, bottom = this.y.to) {
    const count = Math.max(this.rows?.count ?? 1, 1), ranks = Math.max(this.rows?.ranks ?? 1, 1);
    const across = Math.min(Math.max(to - from, Math.min(8, count)), count), down = Math.min(Math.max(bottom - top, Math.min(4, ranks)), ranks);
    const left = Math.min(Math.max(from, 0), count - across), up = Math.min(Math.max(top, 0), ranks - down);
    this.x = { from: left, to: left + across };
    this.y = { from: up, to: up + down };
    this.span = across >= count ? 0 : across;
    this.following = left + across >= count - 1e-6;
    this.hooks.onView(this.x);
    this.draw();
  }

  zoom(factor, event = null, ranks = true) {
    if (!this.rows) return;
    const { x, y, plot } = this;
    let across = 1, down = 0.5;
    if (event) {
      const box = this.canvas.getBoundingClientRect();
      across = Math.min(Math.max((event.clientX - box.left - plot.left) / plot.width, 0), 1);
      down = Math.min(Math.max((event.clientY - box.top - plot.top) / plot.height, 0), 1);
    } else if (this.selected) {
      across = Math.min(Math.max((this.rows.nearest(this.selected.step) - x.from) / (x.to - x.from), 0), 1);
      down = Math.min(Math.max((this.lineOf(this.selected.rank) - y.from) / (y.to - y.from), 0), 1);
    }
    const wide = (x.to - x.from) * factor, high = (y.to - y.from) * (ranks && this.rows.ranks > 32 ? factor : 1);
    const step = x.from + across * (x.to - x.from), rank = y.from + down * (y.to - y.from);
    this.view(step - across * wide, step + (1 - across) * wide, rank - down * high, rank + (1 - down) * high);
  }

  fit() {
    if (this.rows) this.view(0, this.rows.count, 0, this.rows.ranks);
  }

  follow() {
    if (!this.rows) return;
    this.following = true;
    this.end();
    this.draw();
  }

  // Bring a step and a rank into view and mark them.
  select(step, rank) {
    this.selected = { step, rank };
    const row = this.rows?.count ? this.rows.nearest(step) : -1, line = this.lineOf(rank);
    if (row >= 0 && (row < this.x.from || row >= this.x.to || line < this.y.from || line >= this.y.to)) {
      const wide = this.x.to - this.x.from, high = this.y.to - this.y.from;
      this.view(row - wide / 2, row + wide / 2, line - high / 2, line + high / 2);
    }
    this.draw();
  }

  listen() {
    const { canvas } = this, pointers = new Map();
    let start = null;
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && document.activeElement !== canvas && Math.abs(event.deltaX) <= Math.abs(event.deltaY)) return; // the page scrolls
      event.preventDefault();
      const unit = event.deltaMode === 1 ? 20 : 1;
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(event.deltaX * unit, 0);
      else this.zoom(Math.exp(Math.max(Math.min(event.deltaY * unit, 200), -200) * (event.ctrlKey ? 0.01 : 0.002)), event, !event.shiftKey);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      pointers.set(event.pointerId, event);
      canvas.setPointerCapture(event.pointerId);
      start = { event, x: { ...this.x }, y: { ...this.y }, moved: false, at: this.at(event) };
    });
    canvas.addEventListener("pointermove", (event) => {
      this.hooks.onHover(pointers.size ? null : this.at(event), event);
      const before = pointers.get(event.pointerId);
      if (!before) return;
      if (pointers.size === 2) {
        const other = [...pointers.values()].find((one) => one.pointerId !== event.pointerId);
        const was = Math.hypot(before.clientX - other.clientX, before.clientY - other.clientY), is = Math.hypot(event.clientX - other.clientX, event.clientY - other.clientY);
        if (is > 8) this.zoom(was / is, { clientX: (event.clientX + other.clientX) / 2, clientY: (event.clientY + other.clientY) / 2 });
      } else if (start && (start.moved || Math.hypot(event.clientX - start.event.clientX, event.clientY - start.event.clientY) > 4)) {
        start.moved = true;
        canvas.classList.add("panning");
        if (!start.event.shiftKey) this.pan(before.clientX - event.clientX, before.clientY - event.clientY);
      }
      pointers.set(event.pointerId, event);
    });
    const up = (event) => {
      pointers.delete(event.pointerId);
      canvas.classList.remove("panning");
      if (start && event.type === "pointerup" && !pointers.size) this.drop(start, event);
      if (!pointers.size) start = null;
    };
    canvas.addEventListener("pointerup", up);
    canvas.addEventListener("pointercancel", up);
    canvas.addEventListener("pointerleave", () => this.hooks.onHover(null, null));
    canvas.addEventListener("dblclick", () => this.fit());
  }

  drop(start, event) {
    const at = this.at(event);
    if (!start.moved && at) this.hooks.onSelect(at.step, at.rank);
    else if (start.moved && start.event.shiftKey && start.at && at) this.view(Math.min(start.at.row, at.row), Math.max(start.at.row, at.row) + 1);
  }

  pan(across, down) {
    const { plot } = this, steps = (across / plot.width) * (this.x.to - this.x.from), ranks = (down / plot.height) * (this.y.to - this.y.from);
    this.view(this.x.from + steps, this.x.to + steps, this.y.from + ranks, this.y.to + ranks);
  }
}
