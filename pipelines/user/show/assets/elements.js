"use strict";
// These scripts draw the data of page.py, which inserts them in this order: elements, figures, bill, page. All text
// becomes text nodes. Figures are SVG at their present width; a change of width, axis or runs draws them again. Colors
// are classes, so light and dark themes need no redrawing.

const page = JSON.parse(document.getElementById("data").textContent);
const sources = [
  ...page.runs.map((run, i) => ({ ...run, key: `r${i % 8}`, dash: i < 8 ? null : "6 3" })),
  ...page.overlays.map((log, i) => ({ ...log, key: `o${i % 3}`, dash: i < 3 ? null : "6 3", overlay: true })),
];
// With different batches, equal steps are different amounts of training.
const batches = new Set(sources.map((source) => JSON.stringify(source.batches)));
const view = { axis: batches.size > 1 ? "tokens" : "step", scale: "linear" };
const visible = () => sources.filter((source) => !source.hidden);
const redraws = [];
const redraw = () => redraws.forEach((draw) => draw());

// --- elements

const has = (value) => value !== null && value !== undefined;

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "color") element.style.setProperty("--c", `var(--${value})`);
    else if (has(value) && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => has(child) && child !== false));
  return element;
}
const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
const label = (x, y, text, attributes = {}) => svg("text", { x, y, ...attributes }, text);
const line = (kind, x1, y1, x2, y2, more = {}) => svg("line", { class: kind, x1, y1, x2, y2, ...more });
const soft = (...text) => el("p", { class: "soft" }, ...text);
const swatch = (color, box = "") => el("span", { class: `swatch ${box}`, color });

// A table in a box that scrolls by itself; `wrapped` columns hold text, which may break.
function table(heads, rows, { kind = null, wrapped = [] } = {}) {
  const cells = (name, row) => row.map((cell, i) => el(name, {
    scope: name === "th" ? "col" : null,
    class: wrapped.includes(i) ? "wrap" : null,
  }, cell));
  return el("div", { class: "scroll", tabindex: 0 }, el("table", { class: kind },
    el("thead", {}, el("tr", {}, cells("th", heads))),
    el("tbody", {}, rows.map((row) => el("tr", {}, cells("td", row))))));
}

// --- numbers for people

const full = (n) => Math.round(n).toLocaleString("en-US");
function short(n) {
  for (const [unit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(n) >= unit) return `${+(n / unit).toPrecision(3)}${letter}`;
  return `${+n.toPrecision(3)}`;
}
function seconds(s) {
  const two = (n) => String(Math.floor(n)).padStart(2, "0");
  if (s < 60) return `${s.toFixed(1)} s`;
  s = Math.round(s);  // as the terminal does
  if (s < 3600) return `${Math.floor(s / 60)} min ${two(s % 60)} s`;
  return s < 172800 ? `${Math.floor(s / 3600)} h ${two((s % 3600) / 60)} min` : `${(s / 86400).toFixed(1)} days`;
}
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
const score = (n) => (has(n) ? n.toFixed(4) : "–");
const dateTime = (unix) => new Date(unix * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
const plural = (n, word) => `${full(n)} ${word}${n === 1 ? "" : "s"}`;
const dollars = (n) => `$${n >= 1000 ? full(n) : n.toFixed(2)}`;

// A cost; hours of unknown price stand beside the dollars, not in them.
function paid({ usd, unpriced_hours }) {
  const unpriced = unpriced_hours ? `${seconds(3600 * unpriced_hours)} unpriced` : "";
  return [usd > 0 || !unpriced ? dollars(usd) : "", unpriced].filter(Boolean).join(" + ");
}
const hasPrice = (run) => run.account.total.usd > 0;
const costs = (run) => hasPrice(run) || run.account.total.unpriced_hours > 0;
