// Numbers on hover, touch and arrow keys; the page is complete without this.
"use strict";
for (const figure of document.querySelectorAll("figure.chart")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot"), area = figure.querySelector(".area");
  const cursor = figure.querySelector(".cursor"), tip = figure.querySelector(".tip");
  const [first, last] = data.span, width = last - first || 1;
  let at = data.steps.length - 1;

  const row = (name, value, style) => {
    const line = document.createElement("div");
    line.className = style === "culprit" ? "culprit" : "";
    for (const text of [name, value]) line.appendChild(document.createElement("span")).textContent = text;
    return line;
  };
  const show = (index) => {
    at = Math.max(0, Math.min(data.steps.length - 1, index));
    const x = (data.steps[at] - first) / width;
    const step = document.createElement("b");
    step.textContent = data.labels ? data.labels[at] : `step ${data.steps[at]}`;
    const known = data.series.filter((s) => s.text[at]).reverse();
    tip.replaceChildren(step, ...known.map((s) => row(s.name, s.text[at], s.style)));
    cursor.style.left = `${100 * x}%`;
    tip.style.left = x < 0.5 ? `calc(${100 * x}% + 10px)` : "auto";
    tip.style.right = x < 0.5 ? "auto" : `calc(${100 * (1 - x)}% + 10px)`;
    cursor.hidden = tip.hidden = false;
  };
  const nearest = (step) => {
    let low = 0, high = data.steps.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (data.steps[middle] < step) low = middle + 1; else high = middle;
    }
    return low > 0 && step - data.steps[low - 1] < data.steps[low] - step ? low - 1 : low;
  };
  const hide = () => { cursor.hidden = tip.hidden = true; };
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    show(nearest(first + width * (event.clientX - box.left) / box.width));
  });
  area.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageDown: -20, PageUp: 20 }[event.key];
    if (move) { event.preventDefault(); show(at + move); }
    if (event.key === "Home" || event.key === "End") { event.preventDefault(); show(event.key === "Home" ? 0 : 1e9); }
    if (event.key === "Escape") hide();
  });
}
