// Numbers on hover, touch and arrow keys, and one range of steps for all charts over steps; the page is complete without this.
"use strict";

const LEAST_POINTS = 8;
const TICK_PX = 56;
const charts = [];
let shown = null; // the range of steps of all charts; null: every chart its whole one

class Chart {
  constructor(figure) {
    const find = (name) => figure.querySelector(name);
    this.data = JSON.parse(find("script").textContent);
    [this.figure, this.plot, this.area, this.svg] = [figure, find(".plot"), find(".area"), find("svg")];
    [this.cursor, this.tip, this.labels] = [find(".cursor"), find(".tip"), find(".x")];
    [this.from, this.to] = this.data.span;
    this.at = this.data.steps.length - 1;
    this.selection = this.area.appendChild(made("div", "selection"));
    this.selection.hidden = true;
    this.listen();
    // Sizes and hosts are no range of steps: their charts show everything.
    if (this.data.marks && this.data.steps.length > LEAST_POINTS) this.zoomable();
  }

  get range() {
    const whole = { from: this.from, to: this.to };
    return (this.zooms && shown) || whole;
  }

  // Where a step lies, as a share of what is shown.
  place(step) {
    const { from, to } = this.range;
    return (step - from) / (to - from || 1);
  }

  tell(index) {
    const { steps, labels, series } = this.data;
    this.at = index;
    const step = steps[this.at];
    const known = series.filter((one) => one.text[this.at]).reverse(), x = this.place(step);
    this.tip.replaceChildren(made("b", "", labels ? labels[this.at] : `step ${step}`), ...known.map((one) => {
      const line = made("div", one.style === "culprit" ? "culprit" : "");
      line.append(made("span", "", one.name), made("span", "", one.text[this.at]));
      return line;
    }));
    this.tip.style.left = x < 0.5 ? `calc(${100 * x}% + 10px)` : "auto";
    this.tip.style.right = x < 0.5 ? "auto" : `calc(${100 * (1 - x)}% + 10px)`;
    this.tip.hidden = false;
    for (const chart of this.zooms ? charts.filter((one) => one.zooms) : [this]) chart.point(step);
  }

  // To another step, which is brought into view.
  step(by) {
    const { steps } = this.data, { from, to } = this.range;
    this.at = Math.max(0, Math.min(steps.length - 1, this.at + by));
    const step = steps[this.at];
    if (step < from || step > to) show(step - (to - from) / 2, step + (to - from) / 2);
    this.tell(this.at);
  }

  point(step) {
    this.cursor.style.left = `${100 * this.place(step)}%`;
    this.cursor.hidden = false;
  }

  nearest(step) {
    const { steps } = this.data;
    let low = 0, high = steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1; else high = middle;
    }
    return low > 0 && step - steps[low - 1] < steps[low] - step ? low - 1 : low;
  }

  listen() {
    const pointed = (event) => {
      const box = this.area.getBoundingClientRect(), { from, to } = this.range;
      this.tell(this.nearest(from + (to - from) * Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1)));
    };
    this.area.addEventListener("pointerdown", pointed);
    this.area.addEventListener("pointermove", pointed);
    // A finger has gone when it is lifted: what it pointed at stays until the next touch.
    this.area.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") hide(); });
    this.plot.addEventListener("blur", hide);
    this.plot.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const move = { ArrowLeft: -1, ArrowRight: 1, PageDown: -20, PageUp: 20, Home: -Infinity, End: Infinity }[event.key];
      const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
      if (move) this.step(move * (event.shiftKey ? 10 : 1));
      else if (factor && this.zooms) {
        const step = this.data.steps[this.at];
        show(...zoomed(this.range, factor, Math.min(Math.max(this.place(step), 0), 1)));
        this.step(0);
      } else if (event.key === "0" || event.key === "Escape") all();
      else return;
      event.preventDefault();
    });
  }

  zoomable() {
    this.zooms = true;
    this.area.classList.add("zooms");
    this.plot.setAttribute("aria-description", "Arrow keys choose a step, plus and minus zoom, escape shows all steps.");
    this.whole = this.figure.querySelector(".legend").appendChild(made("button", "whole"));
    this.whole.type = "button";
    this.whole.addEventListener("click", all);
    brush(this.area, {
      plot: () => this.area.getBoundingClientRect(),
      range: () => this.range,
      mark: (range) => { for (const chart of charts) if (chart.zooms) chart.select(range); },
      show, all,
    });
    new ResizeObserver(() => this.axis()).observe(this.area);
    this.draw();
  }

  select(range) {
    this.selection.hidden = !range;
    if (!range) return;
    const [low, high] = [range.from, range.to].map((step) => Math.min(Math.max(this.place(step), 0), 1));
    this.selection.style.left = `${100 * low}%`;
    this.selection.style.width = `${100 * (high - low)}%`;
  }

  // The picture holds all steps; what is shown of it is its view box.
  draw() {
    const { from, to } = this.range;
    this.svg.setAttribute("viewBox", `${from - this.from} 0 ${to - from} ${this.svg.viewBox.baseVal.height}`);
    this.figure.classList.toggle("zoomed", shown !== null);
    this.whole.hidden = shown === null;
    this.whole.textContent = `Steps ${Math.ceil(from)} to ${Math.floor(to)}: show all`;
    for (const [index, flag] of [...this.area.querySelectorAll(".flag")].entries()) {
      const [since, until] = this.data.marks[index], x = Math.min(Math.max(this.place(since), 0), 1), right = x >= 0.6;
      flag.hidden = since > to || (until !== null && until < from);
      flag.className = `flag ${right ? "right" : "left"}`;
      [flag.style.left, flag.style.right] = right ? ["auto", `${100 * (1 - x)}%`] : [`${100 * x}%`, "auto"];
    }
    this.axis();
  }

  axis() {
    const { from, to } = this.range;
    this.labels.replaceChildren(...ticks(from, to, this.area.clientWidth / TICK_PX, 1).map((step) => {
      const x = this.place(step), label = made("span", x > 0.97 ? "end" : "", String(step));
      label.style.left = `${100 * x}%`;
      return label;
    }));
  }
}

function made(name, kind, text = "") {
  const element = document.createElement(name);
  if (kind) element.className = kind;
  element.textContent = text;
  return element;
}

// Charts that zoom are over the same steps.
function show(from, to) {
  const { from: first, to: last, data } = charts.find((chart) => chart.zooms), whole = last - first;
  const least = (LEAST_POINTS * whole) / (data.steps.length - 1);
  const width = Math.min(Math.max(to - from, least), whole);
  const low = Math.min(Math.max((from + to - width) / 2, first), last - width);
  shown = width < whole ? { from: low, to: low + width } : null;
  draw();
}

function all() {
  shown = null;
  draw();
}

function draw() {
  hide();
  for (const chart of charts) if (chart.zooms) chart.draw();
}

function hide() {
  for (const chart of charts) chart.cursor.hidden = chart.tip.hidden = true;
}

for (const figure of document.querySelectorAll("figure.chart")) charts.push(new Chart(figure));
charts.find((chart) => chart.zooms)?.figure.querySelector(".legend")
  .append(made("span", "hint", "Drag across a chart to zoom in; a double click or Esc shows all steps."));
