// The range of steps that charts show, and what pointers and the wheel do to it. A report holds this file inline; the
// live page loads it before its modules.
"use strict";

const DRAG_PX = 4; // less is a click
const PINCH_PX = 8;

// A drag selects a range, with shift it moves the one shown; a double click shows everything; two fingers zoom, and the
// wheel does once the chart has the focus. `view`: plot() → left and width on the page, range() → what is shown,
// show(from, to), all(), mark(range, or null where nothing is selected any more).
function brush(target, view) {
  const pointers = new Map();
  let begun = null;
  const share = (x) => {
    const { left, width } = view.plot();
    return Math.min(Math.max((x - left) / width, 0), 1);
  };
  const selected = (event) => {
    const { from, to } = begun.range, [low, high] = [begun.x, event.clientX].map(share).sort((a, b) => a - b);
    return { from: from + low * (to - from), to: from + high * (to - from) };
  };

  target.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    pointers.set(event.pointerId, event.clientX);
    target.setPointerCapture(event.pointerId);
    begun = pointers.size === 1 ? { x: event.clientX, range: { ...view.range() }, moves: event.shiftKey, far: false } : null;
    view.mark(null);
  });
  target.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) return;
    const before = pointers.get(event.pointerId);
    pointers.set(event.pointerId, event.clientX);
    if (pointers.size === 2) {
      const [, other] = [...pointers].find(([id]) => id !== event.pointerId);
      const was = Math.abs(before - other), is = Math.abs(event.clientX - other);
      if (was > PINCH_PX && is > PINCH_PX) view.show(...zoomed(view.range(), was / is, share((event.clientX + other) / 2)));
    }
    if (!begun) return;
    begun.far ||= Math.abs(event.clientX - begun.x) > DRAG_PX;
    if (!begun.far) return;
    if (!begun.moves) return view.mark(selected(event));
    const { from, to } = begun.range, by = ((begun.x - event.clientX) / view.plot().width) * (to - from);
    view.show(from + by, to + by);
  });
  const drop = (event) => {
    pointers.delete(event.pointerId);
    if (!begun) return;
    const found = event.type === "pointerup" && begun.far && !begun.moves ? selected(event) : null;
    begun = null;
    view.mark(null);
    if (found) view.show(found.from, found.to);
  };
  target.addEventListener("pointerup", drop);
  target.addEventListener("pointercancel", drop);
  target.addEventListener("dblclick", () => view.all());
  target.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY), unit = event.deltaMode === 1 ? 20 : 1;
    const focused = target.closest("[tabindex]") === document.activeElement;
    if (!sideways && !event.ctrlKey && !focused) return; // the page scrolls
    event.preventDefault();
    const { from, to } = view.range();
    if (sideways) {
      const by = ((event.deltaX * unit) / view.plot().width) * (to - from);
      return view.show(from + by, to + by);
    }
    const turned = Math.max(Math.min(event.deltaY * unit, 200), -200) * (event.ctrlKey ? 0.01 : 0.002);
    view.show(...zoomed(view.range(), Math.exp(turned), share(event.clientX)));
  }, { passive: false });
}

// A range that is so many times as wide, around the point at this share of it.
function zoomed({ from, to }, factor, share) {
  const centre = from + share * (to - from), width = factor * (to - from);
  return [centre - share * width, centre + (1 - share) * width];
}

// Round numbers between two values, at most so many, and no closer to one another than `least`.
function ticks(from, to, most, least = 0) {
  const rough = (to - from) / Math.max(most, 1), power = 10 ** Math.floor(Math.log10(rough || 1));
  const step = Math.max([1, 2, 5, 10].map((unit) => unit * power).find((unit) => unit >= rough) ?? power, least);
  const found = [];
  for (let value = Math.ceil(from / step) * step; value <= to; value += step) found.push(value);
  return found;
}
