"use strict";
// Draws what page.py has gathered. All text goes in as text nodes; figures are SVG at the width they have, drawn again
// when that, the axis or the choice of runs changes. Colours are classes, so day and night need no redrawing.

const page = JSON.parse(document.getElementById("data").textContent);
const sources = [
  ...page.runs.map((run, i) => ({ ...run, key: `r${i % 8}`, dash: i < 8 ? null : "6 3" })),
  ...page.overlays.map((overlay, i) => ({ ...overlay, key: `o${i % 3}`, dash: i < 3 ? null : "6 3", overlay: true })),
];
// Beside a run of many times its length, a linear axis would make a short one a vertical line.
const lengths = sources.map((source) => source.steps).filter((steps) => steps > 0);
const view = { axis: "step", scale: Math.max(...lengths) > 8 * Math.min(...lengths) ? "log" : "linear", whole: false, hidden: new Set() };
const redraws = [];
const redraw = () => redraws.forEach((draw) => draw());

// --- elements

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "color") element.style.setProperty("--c", `var(--${value})`);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}
const el = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
const label = (x, y, text, attributes = {}) => svg("text", { x, y, ...attributes }, text);

// --- numbers as people read them

const full = (n) => Math.round(n).toLocaleString("en-US");
const has = (n) => n !== null && n !== undefined;
function short(n) {
  for (const [unit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(n) >= unit) return `${+(n / unit).toPrecision(3)}${letter}`;
  return `${+n.toPrecision(3)}`;
}
function seconds(s) {
  if (s < 60) return `${s.toFixed(1)} s`;
  const minutes = Math.round(s / 60);
  if (s < 3600) return `${Math.floor(s / 60)} min ${String(Math.floor(s % 60)).padStart(2, "0")} s`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min` : `${(minutes / 1440).toFixed(1)} days`;
}
const dollars = (n) => `$${n >= 1000 ? full(n) : n.toFixed(2)}`;
// What a bill came to; hours whose price nobody knows stand beside the dollars, not in them.
const paid = ({ usd, unpriced_hours }) => [usd > 0 || !unpriced_hours ? dollars(usd) : "", unpriced_hours ? `${seconds(3600 * unpriced_hours)} unpriced` : ""].filter(Boolean).join(" + ");
const costs = (run) => run.account.total.usd > 0 || run.account.total.unpriced_hours > 0;
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
const score = (n) => (has(n) ? n.toFixed(4) : "–");
const moment = (unix) => new Date(unix * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" });
const bytes = (n) => (n >= 1e9 ? `${(n / 1e9).toFixed(1)} GB` : n >= 1e6 ? `${(n / 1e6).toFixed(1)} MB` : `${(n / 1e3).toFixed(1)} kB`);
const plural = (n, word) => `${full(n)} ${word}${n === 1 ? "" : "s"}`;

// --- axes

const AXES = {
  step: { name: "steps", title: "optimizer steps", of: (source, curve) => curve.step, text: (x) => `step ${full(x)}` },
  tokens: {
    name: "tokens",
    title: "training tokens",
    of: (source, curve) => curve.step.map((step) => step * source.batch_tokens),
    text: (x) => `${short(x)} tokens`,
  },
  hours: {
    name: "hours",
    title: "billed hours so far",
    of: (source, curve) => (curve.hours.length ? curve.hours : null),
    text: (x) => seconds(3600 * x),
  },
  usd: {
    name: "dollars",
    title: "dollars billed so far",
    of: (source, curve) => (curve.usd.length ? curve.usd : null),
    text: dollars,
  },
};
const curvesOf = (source) => Object.values(source.series).map((curve) => curve.line);
const canShow = (axis) => sources.some((source) => curvesOf(source).some((curve) => AXES[axis].of(source, curve)));

function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return found;
}
function decades(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const m of high / low < 200 ? [1, 2, 5] : [1]) if (m * 10 ** power >= low && m * 10 ** power <= high) found.push(m * 10 ** power);
  return found;
}
const spread = (from, to, start, end) => (value) => start + ((value - from) / (to - from || 1)) * (end - start);

// --- a figure: svg, a cursor that mouse, finger and arrow keys move, a caption, and the numbers as a table

let figures = 0;
function figure({ height, caption, aria, draw, stops, speak, table }) {
  const tip = el("div", { class: "tip", hidden: true });
  const cursor = el("input", { type: "range", min: 0, max: 1000, value: 1000 });
  const canvas = el("div");
  const plot = el("div", { class: "plot" }, canvas, cursor, tip);  // the cursor stays where it is, or it would lose focus
  const number = ++figures;
  let drawn = null;
  const rows = el("div", { class: "scroll" });
  const details = el("details", { ontoggle: () => details.open && rows.replaceChildren(table()) },
    el("summary", {}, `Figure ${number} as a table`), rows);
  const legend = el("figcaption");
  const element = el("figure", {}, plot, legend, details);

  function show(x) {
    if (!drawn) return;
    const stop = stops(drawn, x);
    drawn.hair.replaceChildren(...(stop ? drawn.mark(stop) : []));
    tip.hidden = !stop;
    if (!stop) return;
    tip.replaceChildren(...speak(stop).map((line) => el("div", {}, ...line)));
    cursor.setAttribute("aria-valuetext", speak(stop).map((line) => line.map((part) => part.textContent ?? part).join(" ")).join("; "));
    const room = plot.clientWidth - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room, stop.x > plot.clientWidth / 2 ? stop.x - tip.offsetWidth - 14 : stop.x + 14))}px`;
  }
  const hide = () => {
    tip.hidden = true;
    drawn?.hair.replaceChildren();
  };
  const atCursor = () => show(drawn.left + ((drawn.right - drawn.left) * cursor.value) / 1000);
  fill(plot, {
    onpointermove: (event) => show(event.clientX - plot.getBoundingClientRect().left),
    onpointerdown: (event) => show(event.clientX - plot.getBoundingClientRect().left),
    onpointerleave: hide,
  }, []);
  fill(cursor, {
    oninput: atCursor,
    onfocus: () => cursor.matches(":focus-visible") && atCursor(),
    onblur: hide,
    onkeydown: (event) => {
      const by = { ArrowLeft: -20, ArrowDown: -20, ArrowRight: 20, ArrowUp: 20 }[event.key];
      if (!by) return;
      event.preventDefault();
      cursor.value = +cursor.value + by;
      atCursor();
    },
  }, []);

  redraws.push(() => {
    const width = plot.clientWidth;
    if (!width) return;
    legend.replaceChildren(...fill(document.createDocumentFragment(), {}, [el("b", {}, `Figure ${number}. `), caption()]).childNodes);
    const root = svg("svg", { width, height: height(width), viewBox: `0 0 ${width} ${height(width)}`, role: "img", "aria-label": aria() });
    canvas.replaceChildren(root);
    tip.hidden = true;
    drawn = draw(root, width, height(width));
    drawn.hair = root.appendChild(svg("g", { class: "hair-layer" }));
    cursor.setAttribute("aria-label", `Read values along figure ${number}: ${aria()}`);
    if (details.open) rows.replaceChildren(table());
  });
  return element;
}

// --- line figures

const LINES = {
  "train/loss": { text: (y) => y.toFixed(4) },
  "val/loss": { text: (y) => y.toFixed(4) },
  "eval/hellaswag_acc_norm": { text: (y) => y.toFixed(4) },
  "perf/tokens_per_second": { text: full, zero: true, end: short },
  "perf/mfu": { text: (y) => percent(y), zero: true, tick: (y) => percent(y).replace(".0%", "%") },
  "train/lr": { text: (y) => y.toExponential(2), zero: true, tick: (y) => (y ? y.toExponential(0) : "0") },
  "train/grad_norm": { text: (y) => y.toFixed(3), zero: true },
};

// A curve on the axis that is chosen; a logarithmic one has no place for what came before the first step.
function along(source, curve) {
  const x = AXES[view.axis].of(source, curve);
  const begin = x && view.scale === "log" ? x.findIndex((value) => value > 0) : 0;
  return x && begin >= 0 ? { x: x.slice(begin), y: curve.y.slice(begin) } : null;
}
const seldom = (metric) => metric === "val/loss" || metric === "eval/hellaswag_acc_norm";  // measured, so drawn as rings
const visible = () => sources.filter((source) => !view.hidden.has(source));

// Lines, rings, and for what the stage evaluate found at the end, a diamond: a curve of one point.
function curvesShown(metrics) {
  return visible().flatMap((source) => metrics.flatMap((metric) => {
    const found = [];
    const { line, raw } = source.series[metric] ?? {};
    const drawn = line && along(source, line);
    if (drawn) found.push({ source, metric, role: seldom(metric) ? "val" : "train", ...drawn, raw: raw && along(source, raw) });
    const end = source.series["train/loss"]?.line, value = source.final?.[metric];
    const last = end && has(value) && along(source, { step: end.step.slice(-1), hours: end.hours.slice(-1), usd: end.usd.slice(-1), y: [value] });
    if (last) found.push({ source, metric, role: "evaluate", ...last });
    return found;
  }));
}

const usesReferences = () => visible().some((s) => s.overlay || s.tokenizer === "gpt2");
function referencesOf(metrics) {
  if (!usesReferences()) return [];
  return metrics.flatMap((metric) => (page.references[metric] ?? []).map(([name, size, y]) => ({ y, size, text: `${name}: ${LINES[metric].text(y)}` })));
}

function lineFigure({ metrics, tall, title, caption }) {
  const kind = LINES[metrics[0]];
  const aria = () => {
    const ends = curvesShown(metrics).map((c) => `${c.source.name}, ${c.metric}: from ${kind.text(c.y[0])} to ${kind.text(c.y.at(-1))}`);
    return `${title} against ${AXES[view.axis].title}. ${ends.join("; ") || "Nothing to show on this axis"}.`;
  };

  function draw(root, width, height) {
    const curves = curvesShown(metrics), lines = curves.filter((c) => c.role !== "evaluate"), finals = curves.filter((c) => c.role === "evaluate");
    const roomy = width >= 560;
    const box = { left: 52, right: width - (roomy ? 62 : 10), top: 30, bottom: height - 40 };
    root.append(label(0, 14, title, { class: "title" }));
    if (!curves.length) {
      root.append(label(width / 2, height / 2, "Nothing to show on this axis.", { "text-anchor": "middle" }));
      return { ...box, curves, mark: () => [] };
    }
    // x
    const log = view.scale === "log";
    const xs = curves.flatMap((c) => [c.x[0], c.x.at(-1)]);
    const last = Math.max(...xs), first = log ? Math.min(...xs) : 0;
    const grow = log ? (x) => Math.log10(Math.max(x, first)) : (x) => x;
    const toX = spread(grow(first), grow(last), box.left, box.right);
    const X = (x) => toX(grow(x));
    // y: what most of the run looks like, unless the whole is asked for
    const whole = view.whole || log || metrics.includes("train/lr");
    const late = ({ x, y }) => y.filter((_, i) => whole || x[i] >= x[0] + 0.04 * (x.at(-1) - x[0]));
    const noise = lines.flatMap((c) => (c.raw ? late(c.raw) : [])).sort((a, b) => a - b);
    const seen = [...curves.flatMap(late), ...(noise.length ? [noise[Math.floor(0.01 * noise.length)], noise[Math.floor(0.99 * noise.length)]] : [])];
    let low = kind.zero ? 0 : Math.min(...seen), high = Math.max(...seen);
    if (metrics.includes("eval/hellaswag_acc_norm")) low = Math.min(low, 0.25);
    const sizes = new Set(visible().map((s) => s.size)), known = referencesOf(metrics);
    const own = known.filter((r) => sizes.has(r.size)), next = Math.min(...known.map((r) => r.y).filter((y) => y > high));
    for (const { y } of own) [low, high] = [Math.min(low, y), Math.max(high, y)];
    // What there is to reach, if that is near.
    if (!own.length && metrics.includes("eval/hellaswag_acc_norm") && next - high < 0.7 * (high - low)) high = next;
    const margin = (high - low || Math.abs(high) || 1) * 0.05;
    [low, high] = [kind.zero ? 0 : low - margin, high + margin];
    const Y = spread(low, high, box.bottom, box.top);

    const ink = kind.tick ?? ((y) => (Math.abs(y) >= 1000 ? short(y) : `${+y.toPrecision(4)}`));
    for (const y of ticks(low, high, height > 300 ? 7 : 4))
      root.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: Y(y), y2: Y(y) }),
        label(box.left - 8, Y(y) + 4, ink(y), { "text-anchor": "end" }));
    const small = view.axis === "hours" && last < 1;
    const scaled = small ? 60 : 1;
    const places = log ? decades(first, last) : ticks(0, last * scaled, roomy ? 8 : 4).map((x) => x / scaled);
    for (const x of places) {
      root.append(svg("line", { class: "axis", x1: X(x), x2: X(x), y1: box.bottom, y2: box.bottom + 4 }),
        label(X(x), box.bottom + 18, (view.axis === "usd" ? "$" : "") + short(x * (log ? 1 : scaled)), { "text-anchor": "middle" }));
    }
    const name = log ? `${AXES[view.axis].title} (log)` : small ? AXES[view.axis].title.replace("hours", "minutes") : AXES[view.axis].title;
    root.append(svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }),
      label((box.left + box.right) / 2, height - 4, name, { "text-anchor": "middle" }));

    const clip = `clip${redrawn++}`;
    root.append(svg("clipPath", { id: clip }, svg("rect", { x: box.left - 5, y: box.top - 6, width: Math.max(0, box.right - box.left + 13), height: box.bottom - box.top + 6 })));
    const layer = root.appendChild(svg("g", { "clip-path": `url(#${clip})` }));
    const path = (x, y) => "M" + x.map((value, i) => `${X(value).toFixed(1)} ${Y(y[i]).toFixed(1)}`).join("L");
    for (const c of lines.filter((c) => c.raw)) layer.append(svg("path", { class: "raw", color: c.source.key, d: path(c.raw.x, c.raw.y) }));
    for (const source of new Set(curves.map((c) => c.source))) layer.append(...resumptions(source, X, box));
    for (const c of lines) {
      layer.append(svg("path", { class: c.role === "val" ? "line thin" : "line", color: c.source.key, d: path(c.x, c.y), "stroke-dasharray": c.source.dash }));
      if (c.role === "val" && c.x.length <= width / 7)
        layer.append(...c.x.map((x, i) => svg("circle", { class: "dot", color: c.source.key, cx: X(x), cy: Y(c.y[i]), r: 2.75 })));
    }
    let above = { y: -Infinity, x: 0 };  // a name that would run into the one above it moves to its right
    for (const { y, text } of known.filter((r) => r.y > low && r.y < high).sort((a, b) => b.y - a.y)) {
      above = { y: Y(y), x: Y(y) - above.y < 14 ? above.x + 132 : box.left + 6 };
      layer.append(svg("line", { class: "reference", x1: box.left, x2: box.right, y1: Y(y), y2: Y(y) }),
        label(above.x, Y(y) - 4, text, { class: "halo" }));
    }
    for (const c of finals) layer.append(svg("path", { class: "final", color: c.source.key, d: diamond(X(c.x[0]), Y(c.y[0])) }));
    const settled = (c) => c.role === "evaluate" || !finals.some((f) => f.source === c.source && f.metric === c.metric);
    if (roomy) root.append(...ends(curves.filter((c) => (!c.raw || metrics.length === 1) && settled(c)), X, Y, kind, box));
    const mark = (stop) => [
      svg("line", { class: "hair", x1: stop.x, x2: stop.x, y1: box.top, y2: box.bottom }),
      ...stop.points.filter((p) => Y(p.y) >= box.top - 6).map((p) => svg("circle", { class: "final", color: p.curve.source.key, cx: X(p.at), cy: Y(p.y), r: 4 })),
    ];
    return { ...box, curves, X, mark, back: (px) => { const v = spread(box.left, box.right, grow(first), grow(last))(px); return log ? 10 ** v : v; } };
  }

  function stops(drawn, px) {
    if (!drawn.curves.length) return null;
    const x = Math.max(drawn.left, Math.min(drawn.right, px)), value = drawn.back(x);
    const points = drawn.curves.map((curve) => ({ curve, ...nearest(curve, value, reach(drawn.curves)) })).filter((p) => has(p.y));
    return { x, value, points };
  }
  const speak = ({ value, points }) => [
    [el("b", {}, AXES[view.axis].text(value))],
    ...points.map((p) => [
      el("span", { class: "swatch", color: p.curve.source.key }),
      el("span", {}, p.curve.source.name + (metrics.length > 1 || p.curve.role === "evaluate" ? ` ${p.curve.role}` : "")),
      el("span", { class: "value" }, kind.text(p.y)),
    ]),
  ];
  function table() {
    const curves = curvesShown(metrics);
    if (!curves.length) return el("p", {}, "Nothing to show on this axis.");
    const last = Math.max(...curves.map((c) => c.x.at(-1)));
    const at = Array.from({ length: 21 }, (_, i) => (last * i) / 20);
    return el("table", {},
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, AXES[view.axis].name),
        curves.map((c) => el("th", { scope: "col" }, c.source.name, el("br"), c.metric + (c.raw ? ", running mean" : c.role === "evaluate" ? ", final" : ""))))),
      el("tbody", {}, at.map((x) => el("tr", {}, el("td", {}, AXES[view.axis].text(x)),
        curves.map((c) => el("td", {}, has(nearest(c, x, reach(curves)).y) ? kind.text(nearest(c, x, reach(curves)).y) : "–"))))));
  }
  const height = (width) => (tall ? (width < 560 ? 300 : 430) : 230);
  return figure({ height, caption, aria, draw, stops, speak, table });
}

let redrawn = 0;
const diamond = (x, y) => `M${x - 5.5} ${y}L${x} ${y - 5.5}L${x + 5.5} ${y}L${x} ${y + 5.5}Z`;

// The point of a curve that is nearest to x; none where the curve has ended or not begun, within some slack.
const reach = (curves) => 0.01 * Math.max(...curves.map((c) => c.x.at(-1)));
function nearest({ x: xs, y }, x, slack) {
  if (!(x >= xs[0] - slack && x <= xs.at(-1) + slack)) return {};
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  const i = x - xs[low] <= xs[high] - x ? low : high;
  return { at: xs[i], y: y[i] };
}

// A tick on the axis wherever a later attempt at training went on.
function resumptions(source, X, box) {
  const later = (source.attempts ?? []).filter((a) => a.stage === "train" && a !== source.attempts.find((b) => b.stage === "train"));
  const at = { step: (a) => a.from, tokens: (a) => a.from * source.batch_tokens, hours: (a) => a.billed_before.hours, usd: (a) => a.billed_before.usd }[view.axis];
  return later.filter((a) => a.from > 0 && has(at(a))).map((a) =>
    svg("line", { class: "tick", color: source.key, x1: X(at(a)), x2: X(at(a)), y1: box.bottom - 9, y2: box.bottom }));
}

// The last value of each curve at its right end, pushed apart where they would overlap.
function ends(curves, X, Y, kind, box) {
  const labels = curves.map((c) => ({ x: X(c.x.at(-1)), y: Y(c.y.at(-1)), c })).filter((e) => e.y > box.top - 6).sort((a, b) => a.y - b.y);
  labels.forEach((e, i) => { if (i && e.y < labels[i - 1].y + 14) e.y = labels[i - 1].y + 14; });
  return labels.map((e) => label(Math.min(e.x + 9, box.right + 9), e.y + 4, (kind.end ?? kind.text)(e.c.y.at(-1)), { class: "end halo", color: e.c.source.key }));
}

// --- attempts on the clock

const STATES = {
  done: ["✓", "finished"],
  running: ["●", "running"],
  interrupted: ["▼", "interrupted, after saving"],
  stopped: ["■", "stopped as asked"],
  lost: ["✕", "died without a word"],
  failed: ["!", "failed"],
  stale: ["⤳", "superseded by a later attempt"],
};
const said = (attempt) => STATES[attempt.state]?.[1] ?? attempt.state;

// Wall-clock time to pixels. A pause that is long beside the work is cut short, and says so.
function clock(attempts, left, right) {
  const spans = [];
  for (const { started, ended } of attempts)
    if (spans.length && started <= spans.at(-1).ended) spans.at(-1).ended = Math.max(spans.at(-1).ended, ended);
    else spans.push({ started, ended });
  const busy = spans.reduce((sum, s) => sum + s.ended - s.started, 0) || 1;
  const pauses = spans.slice(1).map((s, i) => ({ from: spans[i].ended, to: s.started }));
  const cut = pauses.filter((p) => p.to - p.from > 0.2 * busy);
  const drawnAs = (p) => (cut.includes(p) ? 0.06 * busy : p.to - p.from);
  const scale = (right - left) / (busy + pauses.reduce((sum, p) => sum + drawnAs(p), 0));
  const at = (t) => {
    let x = left;
    spans.forEach((s, i) => {
      if (t > s.started) x += scale * (Math.min(t, s.ended) - s.started);
      if (i < pauses.length && t > s.ended) x += scale * drawnAs(pauses[i]) * Math.min(1, (t - s.ended) / (pauses[i].to - s.ended));
    });
    return x;
  };
  return { at, cut, busy };
}

const PHASES = {
  train: ["train", "steps that count"],
  evaluate: ["evaluate", "val loss and HellaSwag"],
  tokenize: ["evaluate", "text to tokens"],
  checkpoint: ["save", "training waits for a save"],
  upload: ["save", "results to the store"],
  provision: ["prepare", "the machine comes up"],
  setup: ["prepare", "processes start, imports, the store is read"],
  download: ["prepare", "tokens, weights and commits are fetched"],
  compile: ["prepare", "first step of each attempt, with the compiler"],
  idle: ["idle", "billed, and spent on nothing else"],
  export: ["save", "the Hugging Face checkpoint is written"],
  redone: ["redone", "steps done again after a loss"],
  lost: ["waste", "after the last sign of life"],
};
const phaseColor = (phase) => PHASES[phase]?.[0] ?? "prepare";
const inOrder = (phases) => Object.keys(PHASES).filter((p) => p in phases).concat(Object.keys(phases).filter((p) => !(p in PHASES)));

function timeline(run) {
  const attempts = run.attempts;
  const stages = [...new Set(attempts.map((a) => a.stage))];
  const lane = 46;
  const aria = () => `Attempts of ${run.name} on the clock: ` +
    attempts.map((a) => `${a.stage} ${a.number} ${said(a)}, ${seconds(a.ended - a.started)}`).join("; ") + ".";

  function draw(root, width, height) {
    const box = { left: width < 560 ? 62 : 76, right: width - 8, top: 14, bottom: height - 26 };
    const { at, cut, busy } = clock(attempts, box.left, box.right);
    const zero = attempts[0].started;
    stages.forEach((stage, i) => root.append(label(0, box.top + i * lane + 23, stage),
      svg("line", { class: "grid", x1: box.left, x2: box.right, y1: box.top + i * lane + 36, y2: box.top + i * lane + 36 })));
    const end = Math.max(...attempts.map((a) => a.ended));
    const unit = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800].find((s) => busy / s <= (width < 560 ? 4 : 9)) ?? 604800;
    let free = -Infinity;
    for (let t = 0; zero + t <= end; t += unit) {
      const x = at(zero + t);
      if (cut.some((p) => zero + t > p.from && zero + t < p.to) || x < free) continue;
      free = x + 54;
      root.append(svg("line", { class: "axis", x1: x, x2: x, y1: box.bottom, y2: box.bottom + 4 }),
        label(x, box.bottom + 18, t ? ago(t) : "start", { "text-anchor": t ? "middle" : "start" }));
    }
    root.append(svg("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
    for (const pause of cut) {
      const x = (at(pause.from) + at(pause.to)) / 2;
      root.append(svg("line", { class: "reference", x1: x, x2: x, y1: box.top, y2: box.bottom }),
        label(x, box.top - 3, `${seconds(pause.to - pause.from)} later`, { "text-anchor": "middle", class: "halo" }));
    }
    const places = attempts.map((a) => ({ a, x: at(a.started), w: Math.max(2.5, at(a.ended) - at(a.started) - 1), y: box.top + stages.indexOf(a.stage) * lane }));
    for (const { a, x, w, y } of places) {
      const group = root.appendChild(svg("g", { class: `s-${a.state}` }));
      const total = Math.max(a.ended - a.started, Object.values(a.phases).reduce((sum, s) => sum + s, 0)) || 1;
      group.append(svg("rect", { class: a.state === "running" ? "bar open" : "bar", x, y: y + 11, width: w, height: 14, rx: Math.min(3, w / 2) }));
      let from = x;
      for (const phase of inOrder(a.phases)) {
        const wide = (w * a.phases[phase]) / total;
        group.append(svg("rect", { class: "bar", color: phaseColor(phase), x: from, y: y + 27, width: Math.max(0, wide), height: 5 }));
        from += wide;
      }
      if (w > 26) group.append(label(x + 5, y + 22, `#${a.number}`, { class: a.state === "running" ? "" : "inbar" }));
      group.append(label(x + w, y + 8, STATES[a.state]?.[0] ?? "", { class: "mark", "text-anchor": w < 12 ? "middle" : "end" }));
    }
    const mark = ({ place }) => [svg("rect", { class: "hair", fill: "none", x: place.x - 2, y: place.y + 9, width: place.w + 4, height: 25, rx: 4 })];
    return { ...box, places, mark };
  }
  function stops({ places }, px) {
    const near = (p) => Math.max(0, p.x - px, px - p.x - p.w);
    const place = places.reduce((best, p) => (near(p) < near(best) ? p : best));
    return { x: Math.min(place.x + place.w, Math.max(place.x, px)), place };
  }
  const speak = ({ place: { a } }) => [
    [el("b", {}, `${a.stage}, attempt ${a.number}`)],
    [`${STATES[a.state]?.[0] ?? ""} ${said(a)}${a.notice ? `: ${a.notice}` : ""}`],
    [`${moment(a.started)}, for ${seconds(a.ended - a.started)}`],
    ...(has(a.from) ? [[`steps ${full(a.from)} to ${full(a.to ?? a.from)}`]] : []),
    [priced(a)],
    ...inOrder(a.phases).filter((p) => a.phases[p] >= 0.05).map((p) =>
      [el("span", { class: "swatch", color: phaseColor(p) }), p, el("span", { class: "value" }, seconds(a.phases[p]))]),
  ];
  const caption = () => [
    `When ${run.name} was worked on. A bar is an attempt: `,
    [...new Set(attempts.map((a) => a.state))].map((state, i) => [i ? ", " : "",
      el("span", { class: `chip s-${state}` }, `${STATES[state]?.[0] ?? ""} ${STATES[state]?.[1] ?? state}`)]),
    ". The strip below it shows what its seconds went to (colours as in the bill; sorted by kind, not in the order of time).",
  ];
  const table = () => el("table", {},
    el("thead", {}, el("tr", {}, ["attempt", "ended", "started", "billed", "steps", "machine", "dollars"].map((t, i) => el("th", { scope: "col", class: i === 1 ? "left" : null }, t)))),
    el("tbody", {}, attempts.map((a) => el("tr", {}, [`${a.stage} ${a.number}`, said(a) + (a.notice ? ` (${a.notice})` : ""), moment(a.started),
      seconds(a.ended - a.started), has(a.from) ? `${full(a.from)} → ${full(a.to ?? a.from)}` : "", a.machine, paid(a.bill)].map((t, i) => el("td", { class: i === 1 ? "wrap left" : null }, t))))));
  return figure({ height: () => 14 + stages.length * lane + 30, caption, aria, draw, stops, speak, table });
}
const ago = (t) => (t < 60 ? `${t} s` : t < 3600 ? `${+(t / 60).toFixed(1)} min` : t < 172800 ? `${+(t / 3600).toFixed(1)} h` : `${+(t / 86400).toFixed(1)} d`);
const priced = (a) => `${a.nodes > 1 ? `${a.nodes} x ` : ""}${a.machine}: ` +
  (has(a.price_per_hour) ? `${paid(a.bill)} at ${dollars(a.price_per_hour)} an hour (${a.price_source})` : `price unknown (${a.price_source})`);

// --- the bill

const worth = (run) => (run.account.total.usd > 0 ? (b) => b.usd : (b) => 3600 * b.hours);
const billed = (run) => Object.values(run.account.by_phase).reduce((sum, b) => sum + worth(run)(b), 0);

function bill(run, most) {
  const { by_phase, by_market, total, interruptions, savings_usd, deaths, unseen_seconds } = run.account;
  const value = worth(run), money = total.usd > 0;
  const phases = inOrder(by_phase).filter((p) => value(by_phase[p]) > 0);
  const all = billed(run);
  if (!all) return [named(run), el("p", { class: "soft" }, "Nothing was billed yet.")];
  const bar = el("div", { class: "bill", "aria-hidden": "true" }, phases.map((p) => {
    const piece = el("span", { color: phaseColor(p), title: `${p}: ${paid(by_phase[p])}` });
    piece.style.flexGrow = value(by_phase[p]);
    return piece;
  }));
  bar.style.width = `${(100 * all) / most}%`;
  const row = (name, b, share) => el("tr", {}, el("td", { class: "wrap" }, name), el("td", {}, seconds(3600 * b.hours)),
    costs(run) && el("td", {}, paid(b)), el("td", {}, share));
  const notes = [
    Object.keys(by_market).length > 1 && `By market: ${Object.entries(by_market).map(([m, b]) => `${m} ${paid(b)} in ${seconds(3600 * b.hours)}`).join(", ")}.`,
    interruptions.hours > 0 && `Being interrupted cost ${costs(run) ? `${paid(interruptions)} and ` : ""}${seconds(3600 * interruptions.hours)}: work done again, time lost, and the way back.`,
    has(savings_usd) && `Against the on-demand price of the same machines, ${dollars(savings_usd)} were saved.`,
    deaths > 0 && `${plural(deaths, "attempt")} died without a word; at most ${seconds(unseen_seconds)} after their last sign of life are missing from this bill.`,
    ...run.faults,
  ].filter(Boolean);
  return [
    named(run),
    bar,
    el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, ["phase", "time", ...(costs(run) ? ["dollars"] : []), "share"].map((t) => el("th", { scope: "col" }, t)))),
      el("tbody", {}, phases.map((p) => row([el("span", { class: "swatch box", color: phaseColor(p) }), p, " ", el("span", { class: "soft" }, PHASES[p]?.[1] ?? "")], by_phase[p], percent(value(by_phase[p]) / all))),
        row(el("b", {}, "all"), total, "100%")))),
    notes.map((note) => el("p", { class: "soft" }, note)),
  ];
}

// --- words

const named = (run) => page.runs.length > 1 && el("h3", {}, run.name);

function lead(run) {
  const model = run.size ? `GPT-2 ${run.size}` : `A GPT-2 of ${short(run.parameters)} parameters`;
  const reached = run.steps >= run.max_steps ? `in ${plural(run.steps, "step")}` : `in ${full(run.steps)} of ${plural(run.max_steps, "step")} so far`;
  const { total } = run.account;
  if (!run.steps) return `${model}, to be trained on ${run.text}. It has not made a step yet.`;
  const cost = costs(run) ? ` and ${paid(total)}` : "";
  const starts = run.starts > 1 ? `, was interrupted ${run.starts - 1 === 1 ? "once" : `${full(run.starts - 1)} times`} and went on` : "";
  const scores = has(run.val_loss) ? ` Its validation loss is ${score(run.val_loss)}` + (has(run.hellaswag) ? ` and its HellaSwag accuracy ${score(run.hellaswag)}.` : ".") : "";
  return `${model}, trained on ${short(run.tokens)} tokens of ${run.text} ${reached}. It took ${seconds(3600 * total.hours)} of billed time${cost}${starts}.${scores}`;
}

function leads(runs) {
  const scored = runs.filter((run) => has(run.val_loss)).sort((a, b) => a.val_loss - b.val_loss);
  const alike = new Set(runs.map((run) => `${run.text} ${run.tokenizer}`)).size === 1;
  const best = alike && scored.length > 1 ? ` The lowest validation loss is ${score(scored[0].val_loss)}, of ${scored[0].name}.` : "";
  return `${runs.map((run) => run.name).join(", ")}, side by side.${alike ? "" : " They read different text, so compare their losses with care."}${best}`;
}

function tiles(run) {
  const { total, goodput, usd_per_billion_tokens } = run.account;
  const rows = [
    ["val loss", score(run.val_loss), has(run.train_loss) ? `train ${score(run.train_loss)}` : ""],
    has(run.hellaswag) && ["HellaSwag", score(run.hellaswag), "acc_norm"],
    ["tokens", short(run.tokens), plural(run.steps, "step")],
    has(run.tokens_per_second) && ["tokens/s", short(run.tokens_per_second), has(run.mfu) ? `MFU ${percent(run.mfu)}` : "median of steps"],
    ["billed", seconds(3600 * total.hours), plural(run.starts, "start")],
    costs(run) && ["dollars", dollars(total.usd), total.unpriced_hours ? `and ${seconds(3600 * total.unpriced_hours)} unpriced`
      : has(usd_per_billion_tokens) ? `${dollars(usd_per_billion_tokens)} per billion tokens` : ""],
    has(goodput) && ["goodput", percent(goodput), "of billed time trained"],
  ];
  return el("dl", { class: "tiles" }, rows.filter(Boolean).map(([name, value, more]) =>
    el("div", {}, more && el("dd", { class: "more" }, more), el("dt", {}, name), el("dd", {}, value))));
}

function overview() {
  const cell = (text) => el("td", {}, text);
  return el("div", { class: "scroll" }, el("table", { class: "runs" },
    el("thead", {}, el("tr", {}, ["run", "state", "model", "tokens", "val loss", "HellaSwag", "tokens/s", "starts", "billed", "dollars", "goodput"].map((t) => el("th", { scope: "col" }, t)))),
    el("tbody", {}, sources.map((s) => el("tr", {},
      el("td", {}, el("span", { class: "swatch box", color: s.key }), s.name),
      cell(s.overlay ? "llm.c's log" : s.state), cell(s.overlay ? "" : s.size ?? short(s.parameters)), cell(short(s.overlay ? s.steps * s.batch_tokens : s.tokens)),
      cell(score(s.val_loss)), cell(score(s.hellaswag)), cell(has(s.tokens_per_second) ? full(s.tokens_per_second) : "–"), cell(s.overlay ? "–" : full(s.starts)),
      cell(s.overlay ? "–" : seconds(3600 * s.account.total.hours)), cell(s.overlay ? "–" : paid(s.account.total)), cell(has(s.account?.goodput) ? percent(s.account.goodput) : "–"))))));
}

// --- controls

function choice(legend, name, options, chosen, change) {
  return el("fieldset", { class: "choice" }, el("legend", {}, legend),
    el("div", { class: "options" }, options.map(([value, text, disabled]) => el("label", { title: disabled },
      el("input", { type: "radio", name, value, checked: value === chosen, disabled: !!disabled, onchange: () => change(value) }), text))));
}
const themes = () => choice("Theme", "theme", [["", "auto"], ["light", "light"], ["dark", "dark"]], "", (theme) =>
  theme ? document.documentElement.setAttribute("data-theme", theme) : document.documentElement.removeAttribute("data-theme"));

function controls() {
  const why = { hours: "no run here has billed time", usd: "no run here has a known price" };
  const keys = sources.length > 1 && el("div", { class: "keys", role: "group", "aria-label": "Runs shown" }, sources.map((source) => {
    const button = el("button", { type: "button", "aria-pressed": "true", onclick: () => {
      view.hidden.has(source) ? view.hidden.delete(source) : view.hidden.add(source);
      button.setAttribute("aria-pressed", !view.hidden.has(source));
      redraw();
    } }, el("span", { class: "swatch", color: source.key }), source.name);
    return button;
  }));
  return el("div", { class: "controls" }, keys,
    choice("Against", "axis", Object.entries(AXES).map(([axis, { name }]) => [axis, name, canShow(axis) ? null : why[axis]]), view.axis, (axis) => { view.axis = axis; redraw(); }),
    choice("Axis", "scale", [["linear", "linear"], ["log", "log"]], view.scale, (scale) => { view.scale = scale; redraw(); }),
    el("label", { class: "check" }, el("input", { type: "checkbox", onchange: (event) => { view.whole = event.target.checked; redraw(); } }), "from the very start"));
}

// --- the page

// What a reader could take wrongly from what is drawn now.
function caveats() {
  const names = (list) => list.map((source) => source.name).join(", ");
  const bytewise = visible().filter((s) => !s.overlay && s.tokenizer !== "gpt2");
  const absent = visible().filter((s) => Object.keys(s.series).length && !curvesOf(s).some((curve) => AXES[view.axis].of(s, curve)));
  const logs = absent.filter((s) => s.overlay), unpriced = absent.filter((s) => !s.overlay);
  return [
    bytewise.length > 0 && visible().length > bytewise.length && ` A token of ${names(bytewise)} is a byte: its losses and those of GPT-2's tokens are not on one scale.`,
    logs.length > 0 && ` ${names(logs)} tells neither time nor money, and is not drawn here.`,
    unpriced.length > 0 && ` Nobody knows the price of ${names(unpriced)}, which is not drawn here.`,
  ];
}

function trainingSection() {
  const any = (metric) => sources.some((s) => s.series[metric] || has(s.final?.[metric]));
  if (!sources.some((s) => Object.keys(s.series).length)) return [el("h2", {}, "Training"), el("p", { class: "soft" }, "No step was committed yet.")];
  const resumed = page.runs.some((r) => r.attempts.some((a) => a.stage === "train" && a.from));
  const ticksSaid = resumed && " Ticks on the axis: a new attempt went on from the last commit.";
  return [
    el("h2", {}, "Training"),
    controls(),
    (any("train/loss") || any("val/loss")) && lineFigure({
      metrics: ["train/loss", "val/loss"], tall: true, title: "Loss, nats per token",
      caption: () => [
        "Training loss (lines; a running mean over 1.3% of the steps, with every step's in pale behind it) and validation loss (rings" +
        (page.runs.some((r) => has(r.final["val/loss"])) ? "; a diamond is the final evaluation" : "") + ").",
        ticksSaid,
        ["hours", "usd"].includes(view.axis) && " The bill is that of all stages and attempts up to each point.",
        usesReferences() && " Dotted: OpenAI's GPT-2 weights on llm.c's validation shard of FineWeb; on other text they are a guide, no comparison.",
        caveats()],
    }),
    any("eval/hellaswag_acc_norm") && lineFigure({
      metrics: ["eval/hellaswag_acc_norm"], title: "HellaSwag accuracy",
      caption: () => ["HellaSwag in completion style (acc_norm); guessing gets 0.25. Rings: while training; a diamond: the final evaluation." + (usesReferences() ? " Dotted: GPT-2 as llm.c measured it, GPT-3 as its paper has it." : ""), caveats()],
    }),
    el("div", { class: "several" },
      any("perf/tokens_per_second") && lineFigure({ metrics: ["perf/tokens_per_second"], title: "Throughput, tokens per second", caption: () => ["Tokens per second of each step, over all GPUs."] }),
      any("perf/mfu") && lineFigure({ metrics: ["perf/mfu"], title: "Model FLOPs utilization", caption: () => [page.mfu + "."] }),
      any("train/lr") && lineFigure({ metrics: ["train/lr"], title: "Learning rate", caption: () => ["Learning rate of each step."] }),
      any("train/grad_norm") && lineFigure({ metrics: ["train/grad_norm"], title: "Gradient norm", caption: () => ["Norm of the gradient before clipping."] })),
  ];
}

function lineageSection(run) {
  const box = (b) => el("div", { class: `artifact${b.there === false ? " missing" : ""}` }, el("b", {}, b.stage), b.name,
    b.fingerprint && el("span", { class: "mono", title: `sha256 of what decides its bytes: ${b.fingerprint}` }, b.fingerprint.slice(0, 16) + "…"),
    b.facts.map((fact) => el("div", {}, fact)),
    b.attempts > 0 && el("div", { class: "soft" }, `${seconds(3600 * b.bill.hours)}, ${plural(b.attempts, "attempt")}${b.bill.usd || b.bill.unpriced_hours ? `, ${paid(b.bill)}` : ""}`),
    b.bytes && el("div", { class: "soft" }, bytes(b.bytes)));
  const of = (stage) => run.lineage.filter((b) => b.stage === stage).map(box);
  const last = [...of("evaluate"), ...of("export")];
  return el("ol", { class: "lineage" }, [of("text"), of("tokenize"), of("train"), last].filter((b) => b.length).map((b) => el("li", {}, b)));
}

function receiptSection(run) {
  const verdict = { true: ["good", "✓ met"], false: ["bad", "✕ missed"], null: ["soft", "not yet"] };
  return [
    el("dl", { class: "receipt" }, run.receipt.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    el("div", { class: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, ["target", "meant", "got", ""].map((t) => el("th", { scope: "col" }, t)))),
      el("tbody", {}, run.targets.map((t) => el("tr", {}, el("td", {}, t.what), el("td", {}, amount(t.target)), el("td", {}, has(t.got) ? amount(t.got) : "–"),
        el("td", {}, el("span", { class: "chip", color: verdict[t.met][0] }, verdict[t.met][1]))))))),
    el("details", {}, el("summary", {}, "The recipe, with every default"), el("pre", {}, run.recipe)),
  ];
}
const amount = (n) => (Number.isInteger(n) ? full(n) : n.toFixed(4));

function build() {
  const { runs } = page;
  const title = runs.length === 1 ? runs[0].name : `${full(runs.length)} runs`;
  document.title = `${title} – skytrain report`;
  const paying = runs.some(costs), most = Math.max(...runs.filter((run) => costs(run) === paying).map(billed));
  const worked = runs.filter((run) => run.attempts.length), sampled = runs.filter((run) => run.sample);
  fill(document.getElementById("page"), {}, [
    el("header", {},
      el("div", { class: "eyebrow" }, "skytrain report, " + moment(page.made)),
      el("h1", {}, title, runs.length === 1 && [" ", el("span", { class: `chip s-${runs[0].state}` }, runs[0].state)]),
      themes(),
      el("p", {}, runs.length === 1 ? lead(runs[0]) : leads(runs))),
    sources.length === 1 ? tiles(runs[0]) : overview(),
    trainingSection(),
    worked.length > 0 && [el("h2", {}, "Attempts"), worked.map(timeline)],
    el("h2", {}, paying ? "Where the money went" : "Where the time went"),
    runs.map((run) => bill(run, costs(run) === paying ? most : billed(run))),  // dollars beside dollars
    sampled.length > 0 && [el("h2", {}, "What it writes"), el("p", { class: "soft" }, "Generated from nothing by the final weights."),
      sampled.map((run) => [named(run), el("pre", {}, run.sample)])],
    el("h2", {}, "Lineage"),
    el("p", { class: "soft" }, "What was made of what. A fingerprint is the sha256 of all that decides an artifact's bytes."),
    runs.map((run) => [named(run), lineageSection(run)]),
    el("h2", {}, "Receipt"),
    el("p", { class: "soft" }, "What it takes to do it again, and whether it reached what it was meant to."),
    runs.map((run) => [named(run), receiptSection(run)]),
    el("footer", {}, el("p", {}, "Long curves are thinned to 2,000 points that keep every extreme; means are taken before that. Times and dollars are those of the attempts' heartbeats. " +
      "This page is one file: it loads nothing and sends nothing.")),
  ]);
  redraw();
  let width = innerWidth;
  addEventListener("resize", () => {
    if (width === innerWidth) return;
    width = innerWidth;
    requestAnimationFrame(redraw);
  });
}
build();
