// --- axes

const AXES = {
  step: { name: "steps", title: "optimizer steps", of: (source, curve) => curve.step, text: (x) => `step ${full(x)}` },
  tokens: {
    name: "tokens",
    title: "training tokens",
    of: (source, curve) => curve.step.map((step) => tokensBefore(source, step)),
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
// Tokens of all steps before a step. Batch sizes: [first step, tokens before it, tokens a step].
function tokensBefore(source, step) {
  const [first, before, batch] = source.batches.findLast(([from]) => from <= step);
  return before + (step - first) * batch;
}
const isOn = (source, axis) => Object.values(source.series).some((curve) => AXES[axis].of(source, curve.line));

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= high / step + 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return found;
}
function decades(low, high) {
  const parts = high / low < 200 ? [1, 2, 5] : [1];
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    found.push(...parts.map((part) => part * 10 ** power));
  return found.filter((value) => value >= low && value <= high);
}
const spread = (from, to, start, end) => (value) => start + ((value - from) / (to - from || 1)) * (end - start);

// --- a figure: svg, a cursor for mouse, finger and arrow keys, a caption, and the numbers as a table

let figures = 0;
function figure({ height, caption, aria, draw, stops, describe, numbers }) {
  const number = ++figures;
  const tip = el("div", { class: "tip", hidden: true });
  const cursor = el("input", { type: "range", min: 0, max: 1000, value: 1000 });
  const canvas = el("div");
  const plot = el("div", { class: "plot" }, canvas, cursor, tip);  // only the canvas is replaced
  const captionBox = el("figcaption"), rows = el("div");
  const details = el("details", {}, el("summary", {}, `Figure ${number} as a table`), rows);
  let drawn = null;

  function show(x) {
    const stop = drawn && stops(drawn, x);
    drawn?.hair.replaceChildren(...(stop ? drawn.mark(stop) : []));
    tip.hidden = !stop;
    if (!stop) return;
    const tipRows = describe(stop);
    const rowText = (row) => row.map((part) => part.textContent ?? part).join(" ").trim();
    cursor.setAttribute("aria-valuetext", tipRows.map(rowText).join("; "));
    tip.replaceChildren(...tipRows.map((row) => el("div", {}, row)));
    const left = stop.x > plot.clientWidth / 2 ? stop.x - tip.offsetWidth - 14 : stop.x + 14;
    tip.style.left = `${Math.max(0, Math.min(plot.clientWidth - tip.offsetWidth, left))}px`;
  }
  const atCursor = () => show(drawn.left + ((drawn.right - drawn.left) * cursor.value) / 1000);
  const atPointer = (event) => show(event.clientX - plot.getBoundingClientRect().left);
  const nowhere = () => {
    tip.hidden = true;
    drawn?.hair.replaceChildren();
  };
  function onkeydown(event) {
    const by = { ArrowLeft: -20, ArrowDown: -20, ArrowRight: 20, ArrowUp: 20 }[event.key];
    if (!by) return;
    event.preventDefault();
    cursor.value = +cursor.value + by;
    atCursor();
  }
  const onfocus = () => cursor.matches(":focus-visible") && atCursor();
  fill(plot, { onpointermove: atPointer, onpointerdown: atPointer, onpointerleave: nowhere }, []);
  fill(cursor, { oninput: atCursor, onfocus, onblur: nowhere, onkeydown }, []);
  fill(details, { ontoggle: () => details.open && rows.replaceChildren(numbers()) }, []);

  redraws.push(() => {
    const width = plot.clientWidth, tall = height(width), name = aria();
    captionBox.replaceChildren();
    fill(captionBox, {}, [el("b", {}, `Figure ${number}. `), caption()]);
    const root = svg("svg", { width, height: tall, viewBox: `0 0 ${width} ${tall}`, role: "img", "aria-label": name });
    canvas.replaceChildren(root);
    drawn = draw(root, width, tall);
    drawn.hair = root.appendChild(svg("g"));
    cursor.setAttribute("aria-label", `Read values along figure ${number}: ${name}`);
    nowhere();
    if (details.open) rows.replaceChildren(numbers());
  });
  return el("figure", {}, plot, captionBox, details);
}

// --- curves

const LINES = {
  "train/loss": { text: score },
  "val/loss": { text: score, rings: true },
  "eval/hellaswag_acc_norm": { text: score, rings: true, floor: 0.25 },  // the result of guessing
  "perf/tokens_per_second": { text: full, fromZero: true, end: short },
  "perf/mfu": { text: percent, fromZero: true, tick: (y) => percent(y).replace(".0%", "%") },
  "train/lr": { text: (y) => y.toExponential(2), fromZero: true, whole: true, tick: (y) => y && y.toExponential(0) },
  "train/grad_norm": { text: (y) => y.toFixed(3), fromZero: true },
};

// A curve on the chosen axis; a logarithmic axis cannot show values before the first step.
function along(source, curve) {
  const x = AXES[view.axis].of(source, curve);
  const begin = x && view.scale === "log" ? x.findIndex((value) => value > 0) : 0;
  return x && begin >= 0 ? { x: x.slice(begin), y: curve.y.slice(begin) } : null;
}

// Lines; rings for metrics of some steps; a diamond for the one result of the stage evaluate.
function curvesShown(metrics) {
  const found = [];
  for (const source of visible())
    for (const metric of metrics) {
      const { line: mean, raw } = source.series[metric] ?? {};
      const drawn = mean && along(source, mean);
      const role = LINES[metric].rings ? "val" : "train";
      if (drawn) found.push({ source, metric, role, ...drawn, raw: raw && along(source, raw) });
      const end = source.series["train/loss"]?.line, value = source.final?.[metric];
      if (!end || !has(value)) continue;
      const [step, hours, usd] = [end.step, end.hours, end.usd].map((column) => column.slice(-1));
      const last = along(source, { step, hours, usd, y: [value] });
      if (last) found.push({ source, metric, role: "evaluate", ...last });
    }
  return found;
}

// The point of a curve nearest to x; none where x is too far outside the curve.
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
function allAt(curves, x) {
  const slack = 0.01 * Math.max(...curves.map((c) => c.x.at(-1)));
  return curves.map((curve) => ({ curve, ...nearest(curve, x, slack) }));
}

const usesReferences = () => visible().some((source) => source.overlay || source.tokenizer === "gpt2");
const referencesOf = (metrics) => (usesReferences() ? metrics.flatMap((metric) => page.references[metric] ?? []) : []);

// --- from values to pixels

function horizontal(curves, box) {
  const log = view.scale === "log";
  const xs = curves.flatMap((c) => [c.x[0], c.x.at(-1)]);
  const last = Math.max(...xs), first = log ? Math.min(...xs) : 0;
  const grow = log ? (x) => Math.log10(Math.max(x, first)) : (x) => x;
  const position = spread(grow(first), grow(last), box.left, box.right);
  const back = spread(box.left, box.right, grow(first), grow(last));
  return { first, last, X: (x) => position(grow(x)), valueAt: (px) => (log ? 10 ** back(px) : back(px)) };
}

// The range of most of a run, unless the reader chooses the whole: the first steps would flatten the rest.
function vertical(metrics, curves, box) {
  const kind = LINES[metrics[0]], floor = LINES[metrics.at(-1)].floor;
  const whole = view.whole || view.scale === "log" || kind.whole;
  const late = ({ x, y }) => y.filter((_, i) => whole || x[i] >= x[0] + 0.04 * (x.at(-1) - x[0]));
  const noise = curves.flatMap((c) => (c.raw ? late(c.raw) : [])).sort((a, b) => a - b);
  const most = noise.length ? [0.01, 0.99].map((share) => noise[Math.floor(share * noise.length)]) : [];
  const values = [...curves.flatMap(late), ...most, ...(has(floor) ? [floor] : []), ...(kind.fromZero ? [0] : [])];
  let low = Math.min(...values), high = Math.max(...values);
  const known = referencesOf(metrics), sizes = new Set(visible().map((source) => source.size));
  const own = known.filter(([, size]) => sizes.has(size)).map(([, , y]) => y);
  const above = Math.min(...known.map(([, , y]) => y).filter((y) => y > high));  // a reference above the curves, if near
  if (!own.length && has(floor) && above - high < 0.7 * (high - low)) own.push(above);
  [low, high] = [Math.min(low, ...own), Math.max(high, ...own)];
  const margin = 0.05 * (high - low || Math.abs(high) || 1);
  [low, high] = [kind.fromZero ? 0 : low - margin, high + margin];
  return { low, high, Y: spread(low, high, box.bottom, box.top) };
}

// --- the parts of a line figure; `at` holds the box, the scales and the curves

function drawAxes(root, { box, X, Y, first, last, low, high, kind, roomy, tall }) {
  const tick = kind.tick ?? ((y) => (Math.abs(y) >= 1000 ? short(y) : `${+y.toPrecision(4)}`));
  for (const y of ticks(low, high, tall ? 7 : 4))
    root.append(line("grid", box.left, Y(y), box.right, Y(y)),
      label(box.left - 8, Y(y) + 4, tick(y), { class: "right" }));
  const log = view.scale === "log", minutes = view.axis === "hours" && last < 1 ? 60 : 1;
  const positions = log ? decades(first * minutes, last * minutes) : ticks(0, last * minutes, roomy ? 8 : 4);
  for (const position of positions) {
    const x = X(position / minutes);
    root.append(line("axis", x, box.bottom, x, box.bottom + 4),
      label(x, box.bottom + 18, (view.axis === "usd" ? "$" : "") + short(position), { class: "middle" }));
  }
  const { title } = AXES[view.axis];
  const name = (minutes > 1 ? title.replace("hours", "minutes") : title) + (log ? " (log)" : "");
  root.append(line("axis", box.left, box.bottom, box.right, box.bottom),
    label((box.left + box.right) / 2, box.bottom + 36, name, { class: "middle" }));
}

let clips = 0;
function clipped(root, box) {
  const id = `clip${++clips}`, width = Math.max(0, box.right - box.left + 13);
  root.append(svg("clipPath", { id },
    svg("rect", { x: box.left - 5, y: box.top - 6, width, height: box.bottom - box.top + 6 })));
  return root.appendChild(svg("g", { "clip-path": `url(#${id})` }));
}

function drawCurves(layer, { box, X, Y, curves }) {
  const path = (x, y) => "M" + x.map((value, i) => `${X(value).toFixed(1)} ${Y(y[i]).toFixed(1)}`).join("L");
  for (const { source, raw } of curves.filter((c) => c.raw))
    layer.append(svg("path", { class: "raw", color: source.key, d: path(raw.x, raw.y) }));
  for (const source of new Set(curves.map((c) => c.source))) layer.append(...resumptions(source, X, box));
  for (const { source, role, x, y } of curves.filter((c) => c.role !== "evaluate")) {
    const kind = role === "val" ? "line thin" : "line";
    layer.append(svg("path", { class: kind, color: source.key, d: path(x, y), "stroke-dasharray": source.dash }));
    const ring = (value, i) => svg("circle", { class: "ring", color: source.key, cx: X(value), cy: Y(y[i]), r: 2.75 });
    if (role === "val" && 7 * x.length <= box.right - box.left) layer.append(...x.map(ring));
  }
}

// A tick on the axis for each later attempt at training.
function resumptions(source, X, box) {
  const positions = {
    step: (a) => a.from,
    tokens: (a) => tokensBefore(source, a.from),
    hours: (a) => a.billed_before.hours,
    usd: (a) => a.billed_before.usd,
  };
  const [, ...later] = (source.attempts ?? []).filter((a) => a.stage === "train");
  const at = later.filter((a) => a.from > 0).map((a) => X(positions[view.axis](a)));
  return at.map((x) => line("tick", x, box.bottom - 9, x, box.bottom, { color: source.key }));
}

// A name that would overlap the one above it moves to the right.
function drawReferences(layer, { box, Y, low, high, known, kind }) {
  let above = { y: -Infinity, x: 0 };
  for (const [name, , y] of known.filter(([, , y]) => y > low && y < high).sort((a, b) => b[2] - a[2])) {
    above = { y: Y(y), x: Y(y) - above.y < 14 ? above.x + 132 : box.left + 6 };
    layer.append(line("reference", box.left, Y(y), box.right, Y(y)),
      label(above.x, Y(y) - 4, `${name}: ${kind.text(y)}`, { class: "halo" }));
  }
}

function drawFinals(layer, { X, Y, curves }) {
  for (const { source, x: [x], y: [y] } of curves.filter((c) => c.role === "evaluate")) {
    const [cx, cy] = [X(x), Y(y)];
    const d = `M${cx - 5.5} ${cy}L${cx} ${cy - 5.5}L${cx + 5.5} ${cy}L${cx} ${cy + 5.5}Z`;
    layer.append(svg("path", { class: "final", color: source.key, d }));
  }
}

// The last value of each curve at its right end, moved apart where they would overlap. The final evaluation replaces the
// value of its curve, and val loss replaces the training loss of a run.
function drawEnds(root, { box, X, Y, curves, kind, metrics }) {
  const settled = ({ source, metric, role, raw }) => role === "evaluate" ||
    ((!raw || metrics.length === 1) && !has(source.final?.[metric]));
  const ends = curves.filter(settled).map((c) => ({ c, x: X(c.x.at(-1)), y: Y(c.y.at(-1)) }))
    .filter(({ y }) => y > box.top - 6).sort((a, b) => a.y - b.y);
  ends.forEach((end, i) => { end.y = Math.max(end.y, i ? ends[i - 1].y + 14 : -Infinity); });
  for (const { c, x, y } of ends) {
    const text = (kind.end ?? kind.text)(c.y.at(-1));
    root.append(label(Math.min(x, box.right) + 9, y + 4, text, { class: "end halo", color: c.source.key }));
  }
}

function lineFigure({ metrics, tall, title, caption }) {
  const kind = LINES[metrics[0]];
  const NOTHING = "Nothing to show on this axis.";
  function aria() {
    const ends = curvesShown(metrics).map(({ source, metric, y }) =>
      `${source.name}, ${metric}: from ${kind.text(y[0])} to ${kind.text(y.at(-1))}`);
    return `${title} against ${AXES[view.axis].title}. ${ends.length ? `${ends.join("; ")}.` : NOTHING}`;
  }
  function draw(root, width, height) {
    const curves = curvesShown(metrics), roomy = width >= 560;
    const box = { left: 52, right: width - (roomy ? 62 : 10), top: 30, bottom: height - 40 };
    root.append(label(0, 14, title, { class: "title" }));
    if (!curves.length) root.append(label(width / 2, height / 2, NOTHING, { class: "middle" }));
    if (!curves.length) return { ...box, curves };
    const scales = { ...horizontal(curves, box), ...vertical(metrics, curves, box) };
    const at = { box, curves, kind, metrics, roomy, tall, known: referencesOf(metrics), ...scales };
    drawAxes(root, at);
    const layer = clipped(root, box);
    drawCurves(layer, at);
    drawReferences(layer, at);
    drawFinals(layer, at);
    if (roomy) drawEnds(root, at);
    const mark = ({ x, points }) => [
      line("hair", x, box.top, x, box.bottom),
      ...points.map((p) => [at.X(p.at), at.Y(p.y), p.curve.source.key]).filter(([, y]) => y >= box.top - 6)
        .map(([cx, cy, color]) => svg("circle", { class: "final", color, cx, cy, r: 4 })),
    ];
    return { ...box, curves, mark, valueAt: at.valueAt };
  }
  function stops({ left, right, curves, valueAt }, px) {
    if (!curves.length) return null;
    const x = Math.max(left, Math.min(right, px)), value = valueAt(x);
    return { x, value, points: allAt(curves, value).filter((p) => has(p.y)) };
  }
  const describe = ({ value, points }) => [
    [el("b", {}, AXES[view.axis].text(value))],
    ...points.map(({ curve: { source, role }, y }) => [
      swatch(source.key),
      el("span", {}, source.name + (metrics.length > 1 || role === "evaluate" ? ` ${role}` : "")),
      el("span", { class: "value" }, kind.text(y)),
    ]),
  ];
  function numbers() {
    const curves = curvesShown(metrics);
    if (!curves.length) return soft(NOTHING);
    const last = Math.max(...curves.map((c) => c.x.at(-1)));
    const heads = curves.map(({ source, metric, raw, role }) =>
      [source.name, el("br"), metric + (raw ? ", running mean" : role === "evaluate" ? ", final" : "")]);
    const positions = Array.from({ length: 21 }, (_, i) => (last * i) / 20);
    const row = (x) => [AXES[view.axis].text(x), ...allAt(curves, x).map(({ y }) => (has(y) ? kind.text(y) : "–"))];
    return table([AXES[view.axis].name, ...heads], positions.map(row));
  }
  const height = (width) => (tall ? (width < 560 ? 300 : 430) : 230);
  return figure({ height, caption, aria, draw, stops, describe, numbers });
}
