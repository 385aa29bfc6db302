// Numbers in words, as ringside/text.py writes them (a test holds the two against each other), and the DOM.

const SECONDS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"], [1e-3, "ms"], [1e-6, "µs"]];

export function digits(value) {
  if (!Number.isFinite(value)) return "–";
  if (!value) return "0";
  value = Number(value.toPrecision(3));
  const magnitude = Math.floor(Math.log10(Math.abs(value)));
  return value.toFixed(Math.min(Math.max(2 - magnitude, 0), 3));
}

export function duration(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return "–";
  if (seconds === 0) return "0 s";
  for (const [scale, unit] of SECONDS) if (Math.abs(seconds) >= scale) return `${digits(seconds / scale)} ${unit}`;
  return `${digits(seconds / 1e-9)} ns`;
}

export function signedPercent(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  const text = (100 * Math.abs(value)).toFixed(1);
  return `${Number(text) === 0 ? "" : value < 0 ? "−" : "+"}${text}%`;
}

// Numbers stay on one line with their units.
export function unbroken(text) {
  return text.replace(/(\d) (?=%|(?:[mµn]?s|min|h|d)\b)/g, "$1\u00a0");
}

// Only ever text, never markup: names come from whoever ran the job.
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== false) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function shape(name, attributes = {}, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

export function put(parent, ...children) {
  parent.replaceChildren(...children);
}

export const byId = (id) => document.getElementById(id);

export function colours(names) {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
