// Charts over the same steps as the map: stacked areas, lines and bands; each pixel shows the most of its steps.
// `brush` and `ticks` are brush.js's, which the page loads before.

import { colours, duration, element } from "./words.js";

const LEFT = 58;
const BOTTOM = 22;
const TOP = 8;
const REST_MS = 120;
const MOST_MS = 500;

export class Lines {
  // parts: [{ name, kind: "area" | "line" | "band", colour, of: (rows, extra) => Float32Array or [low, high] }], drawn in turn
  // view: the range that all charts show, as `brush` asks for it: range, show, all, mark
  constructor(canvas, legend, parts, { title, onHover, view }) {
    this.canvas = canvas;
    this.parts = parts;
    this.title = title;
    this.x = { from: 0, to: 1 };
    this.rows = null;
    this.extra = null;
    this.cursor = this.marked = null;
    for (const part of parts) {
      const swatch = element("i", { class: part.kind === "line" ? "" : "fill" });
      swatch.style.setProperty("--line", `var(--${part.colour})`);
      legend.append(element("span", { class: "key" }, swatch, part.name), " ");
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(canvas);
    canvas.addEventListener("pointermove", (event) => {
      const box = canvas.getBoundingClientRect();
      const row = Math.floor(this.x.from + ((event.clientX - box.left - LEFT) / (box.width - LEFT)) * (this.x.to - this.x.from));
      onHover(this.rows && row >= 0 && row < this.rows.count ? row : null, event, this);
    });
    canvas.addEventListener("pointerleave", () => onHover(null, null, this));
    const plot = () => {
      const { left, width } = canvas.getBoundingClientRect();
      return { left: left + LEFT, width: width - LEFT };
    };
    brush(canvas, { ...view, plot });
  }

  show(rows, x, extra = null) {
    [this.rows, this.x, this.extra] = [rows, x, extra];
    clearTimeout(this.later);
    // While the map is dragged it has the frames to itself: charts follow when it rests, or twice a second.
    const overdue = performance.now() - (this.painted ?? -1e3) > MOST_MS;
    this.later = setTimeout(() => this.draw(), overdue ? 0 : REST_MS);
  }

  // The range that is being selected, in rows; null: none is.
  mark(range) {
    if (range === this.marked) return;
    this.marked = range;
    this.draw();
  }

  // Where a row lies, in pixels from the left of the canvas.
  place(row) {
    return LEFT + ((row - this.x.from) / (this.x.to - this.x.from)) * Math.max(this.canvas.clientWidth - LEFT, 1);
  }

  at(cursor) {
    if (cursor === this.cursor) return;
    this.cursor = cursor;
    this.draw();
  }

  draw() {
    if (this.dirty) return;
    this.dirty = true;
    requestAnimationFrame(() => {
      this.dirty = false;
      this.paint();
      this.painted = performance.now();
    });
  }

  values(row) {
    return this.parts.map((part) => {
      const series = part.of(this.rows, this.extra);
      if (!series) return [part.name, "–"];
      return [part.name, part.kind === "band" ? `${duration(series[0][row])} … ${duration(series[1][row])}` : duration(series[row])];
    });
  }

  paint() {
    const { canvas, rows } = this, ratio = Math.min(devicePixelRatio || 1, 2);
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    if (!rows || !rows.count) return;
    this.ink = colours(["ink", "faint", "rule", "s0", ...this.parts.map((part) => part.colour)]);
    const plot = { left: LEFT, top: TOP, width: Math.max(width - LEFT, 1), height: Math.max(height - TOP - BOTTOM, 1) };
    const drawn = this.pixels(plot);
    const range = this.range(drawn), y = (value) => plot.top + plot.height * (1 - (value - range.low) / (range.high - range.low));
    this.axes(context, plot, y, range);
    for (const { part, low, high } of drawn) this.part(context, plot, y, part, low, high);
    if (this.cursor !== null) {
      context.fillStyle = this.ink.faint;
      context.fillRect(this.place(this.cursor + 0.5), plot.top, 1, plot.height);
    }
    if (this.marked) {
      const { from, to } = this.marked, left = this.place(from), right = this.place(to);
      context.fillStyle = this.ink.s0;
      context.globalAlpha = 0.18;
      context.fillRect(left, plot.top, right - left, plot.height);
      context.globalAlpha = 1;
      for (const edge of [left, right]) context.fillRect(edge - 0.5, plot.top, 1, plot.height);
    }
    this.say(drawn);
  }

  // Per part and pixel (or step, where steps are wider) the lower and the upper edge.
  pixels(plot) {
    const { rows, x } = this, from = Math.max(Math.floor(x.from), 0), to = Math.min(Math.ceil(x.to), rows.count);
    const buckets = Math.max(Math.min(Math.ceil(plot.width), to - from), 1);
    this.buckets = { from, to, buckets };
    let base = null;
    return this.parts.map((part) => {
      const series = part.of(rows, this.extra), low = new Float64Array(buckets).fill(NaN), high = new Float64Array(buckets).fill(NaN);
      const [below, above] = part.kind === "band" ? series : [series, series];
      for (let bucket = 0; bucket < buckets; bucket++) {
        const first = from + Math.floor((bucket * (to - from)) / buckets), last = Math.max(from + Math.floor(((bucket + 1) * (to - from)) / buckets), first + 1);
        for (let row = first; above && row < last; row++) {
          if (!(above[row] <= high[bucket])) high[bucket] = above[row] >= 0 ? above[row] : high[bucket];
          if (!(below[row] >= low[bucket])) low[bucket] = below[row] >= 0 ? below[row] : low[bucket];
        }
        if (part.kind !== "area") continue;
        // Where the lowest area is not known, none of those on it is.
        low[bucket] = base ? base[bucket] : 0;
        high[bucket] = base ? base[bucket] + (high[bucket] || 0) : high[bucket];
      }
      if (part.kind === "area") base = high;
      return { part, low, high };
    });
  }

  part(context, plot, y, part, low, high) {
    const { from, to, buckets } = this.buckets, colour = this.ink[part.colour];
    const x = (bucket) => plot.left + ((from + ((bucket + 0.5) * (to - from)) / buckets - this.x.from) / (this.x.to - this.x.from)) * plot.width;
    context.save();
    context.beginPath();
    context.rect(plot.left, plot.top - 2, plot.width, plot.height + 2);
    context.clip();
    context.beginPath();
    if (part.kind === "line") {
      let pen = false;
      for (let i = 0; i < buckets; i++) {
        if (Number.isNaN(high[i])) { pen = false; continue; }
        if (pen) context.lineTo(x(i), y(high[i])); else context.moveTo(x(i), y(high[i]));
        pen = true;
      }
      context.strokeStyle = colour;
      context.lineWidth = part.bold ? 2 : 1.4;
      context.lineJoin = "round";
      if (part.dash) context.setLineDash([4, 4]);
      context.stroke();
    } else {
      // One shape for every stretch without a gap.
      for (let first = 0; first < buckets; first++) {
        if (Number.isNaN(high[first])) continue;
        let last = first;
        while (last + 1 < buckets && !Number.isNaN(high[last + 1])) last++;
        context.moveTo(x(first - 0.5), y(high[first]));
        for (let i = first; i <= last; i++) context.lineTo(x(i), y(high[i]));
        context.lineTo(x(last + 0.5), y(high[last]));
        context.lineTo(x(last + 0.5), y(low[last]));
        for (let i = last; i >= first; i--) context.lineTo(x(i), y(low[i]));
        context.lineTo(x(first - 0.5), y(low[first]));
        context.closePath();
        first = last;
      }
      context.globalAlpha = part.kind === "band" ? 0.2 : 0.85;
      context.fillStyle = colour;
      context.fill();
    }
    context.restore();
  }

  // From zero where areas are stacked; else as a report does it: lines that lie close together far above zero fill the chart.
  range(drawn) {
    const high = Math.max(...drawn.map((one) => one.high.reduce((a, b) => (b > a ? b : a), 0)));
    const low = Math.min(...drawn.map((one) => (one.part.kind === "area" ? 0 : one.low.reduce((a, b) => (b < a ? b : a), high))));
    return low < 0.6 * high || !high ? { low: 0, high: 1.06 * high || 1e-3 } : { low: low - 0.25 * (high - low || 0.4 * high), high: high + 0.1 * (high - low || high) };
  }

  axes(context, plot, y, { low, high }) {
    context.font = "12px ui-sans-serif, system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const value of ticks(low, high, 4)) {
      const at = y(value);
      context.fillStyle = this.ink.rule;
      context.fillRect(plot.left, at, plot.width, 1);
      context.fillStyle = this.ink.faint;
      context.fillText(duration(value).replace(/\.0+(?=\D)/, ""), plot.left - 8, at);
    }
    context.textBaseline = "alphabetic";
    context.fillText("step", plot.left - 8, plot.top + plot.height + 16);
    const edge = plot.left + plot.width;
    for (const row of ticks(this.x.from, this.x.to - 0.01, plot.width / 64, 1)) {
      if (row >= this.rows.count) continue;
      const at = this.place(row + 0.5);
      context.fillRect(at, plot.top + plot.height, 1, 4);
      context.textAlign = at > edge - 24 ? "right" : "center";
      context.fillText(this.rows.steps[row].toLocaleString("en"), Math.min(at, edge), plot.top + plot.height + 16);
    }
  }

  say(drawn) {
    const last = this.buckets.to - 1;
    const said = `${this.title}. At step ${this.rows.steps[last]}: ${this.values(last).map(([name, text]) => `${name} ${text}`).join(", ")}.`;
    this.canvas.setAttribute("aria-label", said);
  }
}
