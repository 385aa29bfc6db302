// A verdict's chain of waits, from who waits to the culprit, as the report draws it (run_report.py).

import { element, shape } from "./words.js";

const MOST_LINKS = 6; // of a longer chain its ends are drawn
const RADIUS = 19, MIDDLE = 34, LEAST_APART = 104, LETTER = 6.6;

export function chainFigure({ ranks, along }, words, placeOf) {
  const half = MOST_LINKS / 2, cut = along.length > MOST_LINKS;
  const shown = cut ? [...ranks.slice(0, half), null, ...ranks.slice(-half)] : ranks;
  const names = cut ? [...along.slice(0, half - 1), "", "", ...along.slice(1 - half)] : along;
  const places = shown.map((rank) => (rank === null ? "" : placeOf(rank)));
  const apart = Math.max(LEAST_APART, LETTER * Math.max(...places.map((place) => place.length)) + 20); // places stand beside one another
  const across = (index) => apart / 2 + apart * index, width = across(shown.length - 1) + apart / 2;
  const svg = shape("svg", { viewBox: `0 0 ${width} 86`, role: "img", "aria-label": words });
  svg.style.maxWidth = `${width}px`;
  names.forEach((name, index) => {
    const last = index === names.length - 1 ? " culprit" : "", to = across(index + 1) - RADIUS - (last ? 9 : 5);
    svg.append(
      shape("path", { class: `link${last}`, d: `M${across(index) + RADIUS + 4} ${MIDDLE}H${to}` }),
      shape("path", { class: `tip${last}`, d: `M${to} ${MIDDLE}l-9-4.5v9z` }),
      shape("text", { class: "along", x: across(index) + apart / 2, y: MIDDLE - 11 }, name),
    );
  });
  shown.forEach((rank, index) => {
    const x = across(index), culprit = index === shown.length - 1;
    if (rank === null) return svg.append(shape("text", { x, y: MIDDLE }, "…"));
    if (culprit) svg.append(shape("circle", { class: "halo", cx: x, cy: MIDDLE, r: RADIUS + 4 }));
    svg.append(
      shape("circle", { class: `node${culprit ? " culprit" : ""}`, cx: x, cy: MIDDLE, r: RADIUS }),
      shape("text", { x, y: MIDDLE }, String(rank)),
      shape("text", { class: "place", x, y: MIDDLE + 40 }, places[index]),
    );
  });
  return element("figure", { class: "chain" }, svg, element("figcaption", {}, `${words}: an arrow points to the rank that is waited for.`));
}
