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
// A figure that can zoom has `valueAt`, from pixels to its axis: a drag with the mouse or the keys + and - choose a
// range for all figures, a double click or Escape shows the whole again.

// A range as far as it lies in the whole; null where it covers the whole.
function withinWhole([from, to], [first, last]) {
  return from <= first && to >= last ? null : [Math.max(from, first), Math.min(to, last)];
}

let figures = 0;
function figure({ height, caption, aria, draw, stops, describe, numbers }) {
  const number = ++figures;
  const tip = el("div", { class: "tip", hidden: true });
  const cursor = el("input", { type: "range", min: 0, max: 1000, value: 1000 });
  const canvas = el("div");
  const plot = el("div", { class: "plot" }, canvas, cursor, tip);  // only the canvas is replaced
  const captionBox = el("figcaption"), rows = el("div");
  const details = el("details", {}, el("summary", {}, `Figure ${number} as a table`), rows);
  let drawn = null, drag = null;

  function zoom(range) {
    if (!drawn?.valueAt && range) return;
    view.range = range;
    redraw();
  }
  // The values between two pixels; not less than a thousandth of the present range.
  function between(a, b) {
    const [from, to] = [Math.min(a, b), Math.max(a, b)].map((x) => Math.max(drawn.left, Math.min(drawn.right, x)));
    return to - from > (drawn.right - drawn.left) / 1000 ? [drawn.valueAt(from), drawn.valueAt(to)] : view.range;
  }
  const toPointer = (event) => event.clientX - plot.getBoundingClientRect().left;
  function startDrag(event) {
    if (event.pointerType !== "mouse" || event.button || !drawn?.valueAt) return;
    drag = { from: toPointer(event), box: svg("rect", { class: "chosen", y: drawn.top, height: drawn.bottom - drawn.top }) };
    plot.setPointerCapture(event.pointerId);
  }
  function moveDrag(event) {
    if (!drag) return;
    const clip = (x) => Math.max(drawn.left, Math.min(drawn.right, x));
    const [from, to] = [clip(drag.from), clip(toPointer(event))];
    if (Math.abs(to - from) > 4 && !drag.box.parentNode) drawn.hair.before(drag.box);
    fill(drag.box, { x: Math.min(from, to), width: Math.abs(to - from) }, []);
  }
  function endDrag(event) {
    const chosen = drag?.box.parentNode && event.type === "pointerup";
    const from = drag?.from;
    drag?.box.remove();
    drag = null;
    if (chosen) zoom(between(from, toPointer(event)));
  }

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
  const atPointer = (event) => show(toPointer(event));
  const nowhere = () => {
    tip.hidden = true;
    drawn?.hair.replaceChildren();
  };
  function onkeydown(event) {
    const here = drawn && drawn.left + ((drawn.right - drawn.left) * cursor.value) / 1000;
    const part = { "+": 0.25, "=": 0.25, "-": 1 }[event.key];
    if (part && drawn.valueAt) {
      const reach = part * (drawn.right - drawn.left), wide = [here - reach, here + reach].map(drawn.valueAt);
      zoom(part < 1 ? between(here - reach, here + reach) : withinWhole(wide, drawn.whole));
      cursor.value = 500;
    }
    if (event.key === "Escape" && view.range) zoom(null);
    const by = { ArrowLeft: -20, ArrowDown: -20, ArrowRight: 20, ArrowUp: 20 }[event.key];
    if (!by) return;
    event.preventDefault();
    cursor.value = +cursor.value + by;
    atCursor();
  }
  const onfocus = () => cursor.matches(":focus-visible") && atCursor();
  fill(plot, { onpointermove: atPointer, onpointerdown: atPointer, onpointerleave: nowhere }, []);
  fill(plot, { onpointerdown: startDrag, onpointermove: moveDrag, onpointerup: endDrag, onpointercancel: endDrag }, []);
  fill(plot, { ondblclick: () => drawn?.valueAt && view.range && zoom(null) }, []);
  fill(cursor, { oninput: atCursor, onfocus, onblur: nowhere, onkeydown }, []);
  fill(details, { ontoggle: () => details.open && rows.replaceChildren(numbers()) }, []);

  redraws.push(() => {
    const width = plot.clientWidth, tall = height(width), name = aria();
    const root = svg("svg", { width, height: tall, viewBox: `0 0 ${width} ${tall}`, role: "img", "aria-label": name });
    canvas.replaceChildren(root);
    drawn = draw(root, width, tall);
    drawn.hair = root.appendChild(svg("g"));
    captionBox.replaceChildren();  // after the drawing, which decides what the caption must say
    fill(captionBox, {}, [el("b", {}, `Figure ${number}. `), caption(drawn)]);
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
  "eval/core": { text: score, rings: true, floor: 0 },
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
const lossesCompare = () => usesReferences() && visible().some((source) => source.fineweb);  // of one text only
const referencesOf = (metrics) =>
  metrics.flatMap((metric) => ((metric === "val/loss" ? lossesCompare() : usesReferences()) && page.references[metric]) || []);

// --- from values to pixels

function horizontal(curves, box) {
  const log = view.scale === "log";
  const xs = curves.flatMap((c) => [c.x[0], c.x.at(-1)]);
  const whole = [log ? Math.min(...xs) : 0, Math.max(...xs)];
  const [first, last] = view.range ?? whole;
  const grow = log ? (x) => Math.log10(Math.max(x, first)) : (x) => x;
  const position = spread(grow(first), grow(last), box.left, box.right);
  const back = spread(box.left, box.right, grow(first), grow(last));
  return { first, last, whole, X: (x) => position(grow(x)), valueAt: (px) => (log ? 10 ** back(px) : back(px)) };
}

// The range of most of a run, unless the reader chooses the whole: the first steps would flatten the rest.
function vertical(metrics, curves, box) {
  const kind = LINES[metrics[0]], floor = view.range ? null : LINES[metrics.at(-1)].floor;
  const whole = view.whole || view.scale === "log" || kind.whole || view.range;
  const [from, to] = view.range ?? [-Infinity, Infinity];
  const inside = (x, i) => (x[i + 1] ?? x[i]) >= from && (x[i - 1] ?? x[i]) <= to;  // with a neighbor on each side
  const late = ({ x, y }) =>
    y.filter((_, i) => inside(x, i) && (whole || x[i] >= x[0] + 0.04 * (x.at(-1) - x[0])));
  const noise = curves.flatMap((c) => (c.raw ? late(c.raw) : [])).sort((a, b) => a - b);
  const most = noise.length ? [0.01, 0.99].map((share) => noise[Math.floor(share * noise.length)]) : [];
  const shown = curves.flatMap(late);
  const values = [...(shown.length ? shown : curves.flatMap(({ y }) => y)), ...most, ...(has(floor) ? [floor] : []), ...(kind.fromZero ? [0] : [])];
  let low = Math.min(...values), high = Math.max(...values);
  const known = view.range ? [] : referencesOf(metrics), sizes = new Set(visible().map((source) => source.size));
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
  const positions = log ? decades(first * minutes, last * minutes) : ticks(first * minutes, last * minutes, roomy ? 8 : 4);
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
  return at.filter((x) => x >= box.left && x <= box.right).map((x) => line("tick", x, box.bottom - 9, x, box.bottom, { color: source.key }));
}

// Published results: dotted lines with their names. A name stands where it covers no curve, no other line and no other
// name; one without such a place goes into the caption. Returns the names that went there.
function drawReferences(layer, at, ends) {
  const { box, Y, low, high, known, kind } = at;
  const shown = known.filter(([, , y]) => y > low && y < high).sort((a, b) => b[2] - a[2]);
  for (const [, , y] of shown) layer.append(line("reference", box.left, Y(y), box.right, Y(y)));
  const free = freePlaces(at, shown.map(([, , y]) => Y(y)), ends);
  return shown.flatMap(([name, , y]) => {
    const text = `${name}: ${kind.text(y)}`, found = label(0, 0, text, { class: "halo" });
    layer.append(found);
    const place = free(found.getComputedTextLength(), Y(y));
    if (place) fill(found, place, []);
    else found.remove();
    return place ? [] : [text];
  });
}

const TALL = 12;  // pixels of a label from its baseline upwards; 3 below it
// Finds the place of a label beside the line at height y: a function from its width and y to the place of its baseline,
// or to null. Each found place is taken.
function freePlaces({ box, X, Y, curves }, heights, taken) {
  const covered = inkOf(curves.flatMap((c) => (c.raw ? [c, c.raw] : [c])), X, Y);
  const hits = (left, right, top, bottom) =>
    heights.some((y) => y > top && y < bottom) ||
    taken.some((t) => t.left < right && t.right > left && t.top < bottom && t.bottom > top) ||
    covered(left, right, top, bottom);
  return (width, y) => {
    const baselines = [y - 4, y + TALL + 1].filter((b) => b - TALL >= box.top - 6 && b + 3 <= box.bottom);
    for (let x = box.left + 6; x + width <= box.right; x += 6)
      for (const baseline of baselines) {
        const edges = [x - 3, x + width + 3, baseline - TALL, baseline + 3];
        if (hits(...edges)) continue;
        const [left, right, top, bottom] = edges;
        taken.push({ left, right, top, bottom });
        return { x, y: baseline };
      }
    return null;
  };
}

// Whether curves touch a box: their lowest and highest pixel in each column, with the width of their lines.
function inkOf(curves, X, Y) {
  const REACH = 5;  // pixels of a ring or a diamond around its point
  const columns = curves.map(({ x, y }) => {
    const found = new Map();
    const mark = (column, height) => {
      const [low, high] = found.get(column) ?? [Infinity, -Infinity];
      found.set(column, [Math.min(low, height - REACH), Math.max(high, height + REACH)]);
    };
    x.forEach((value, i) => {
      const [x1, y1] = [X(value), Y(y[i])], [x0, y0] = i ? [X(x[i - 1]), Y(y[i - 1])] : [x1, y1];
      if (x1 < -50 || x0 > 5000) return;
      for (let column = Math.floor(x0) - (i ? 0 : REACH); column <= x1 + REACH; column++)
        mark(column, x1 > x0 ? y0 + Math.max(0, Math.min(1, (column - x0) / (x1 - x0))) * (y1 - y0) : y1);
    });
    return found;
  });
  return (left, right, top, bottom) => columns.some((found) => {
    for (let column = Math.floor(left); column <= right; column++) {
      const [low, high] = found.get(column) ?? [Infinity, -Infinity];
      if (low < bottom && high > top) return true;
    }
    return false;
  });
}

function drawFinals(layer, { X, Y, curves }) {
  for (const { source, x: [x], y: [y] } of curves.filter((c) => c.role === "evaluate")) {
    const [cx, cy] = [X(x), Y(y)];
    const d = `M${cx - 5.5} ${cy}L${cx} ${cy - 5.5}L${cx + 5.5} ${cy}L${cx} ${cy + 5.5}Z`;
    layer.append(svg("path", { class: "final", color: source.key, d }));
  }
}

// The last value of each curve at its right end, moved apart where they would overlap. The final evaluation replaces the
// value of its curve, and val loss replaces the training loss of a run. Returns the boxes of the labels.
function drawEnds(root, { box, X, Y, last, curves, kind, metrics }) {
  const evaluated = ({ source, metric }) =>
    curves.some((c) => c.role === "evaluate" && c.source === source && c.metric === metric && c.x[0] <= last);
  const settled = (c) => c.role === "evaluate" || ((!c.raw || metrics.length === 1) && !evaluated(c));
  const endOf = (c) => {
    const i = c.x.findLastIndex((x) => x <= last);  // beyond it is not in the range
    return { c, value: c.y[i], x: i + 1 < c.x.length ? box.right : X(c.x[i]), y: Y(c.y[i]) };
  };
  const ends = curves.filter(settled).map(endOf)
    .filter(({ x, y }) => x >= box.left && y > box.top - 6 && y < box.bottom + 6).sort((a, b) => a.y - b.y);
  ends.forEach((end, i) => { end.y = Math.max(end.y, i ? ends[i - 1].y + 14 : -Infinity); });
  return ends.map(({ c, value, x, y }) => {
    const left = Math.min(x, box.right) + 9;
    root.append(label(left, y + 4, (kind.end ?? kind.text)(value), { class: "end halo", color: c.source.key }));
    return { left, right: left + 62, top: y - 8, bottom: y + 7 };
  });
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
    const unnamed = drawReferences(layer, at, roomy ? drawEnds(root, at) : []);
    drawFinals(layer, at);
    const mark = ({ x, points }) => [
      line("hair", x, box.top, x, box.bottom),
      ...points.map((p) => [at.X(p.at), at.Y(p.y), p.curve.source.key]).filter(([, y]) => y >= box.top - 6)
        .map(([cx, cy, color]) => svg("circle", { class: "final", color, cx, cy, r: 4 })),
    ];
    return { ...box, curves, mark, unnamed, valueAt: at.valueAt, whole: at.whole };
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
    const [first, last] = view.range ?? [0, Math.max(...curves.map((c) => c.x.at(-1)))];
    const heads = curves.map(({ source, metric, raw, role }) =>
      [source.name, el("br"), metric + (raw ? ", running mean" : role === "evaluate" ? ", final" : "")]);
    const positions = Array.from({ length: 21 }, (_, i) => first + ((last - first) * i) / 20);
    const row = (x) => [AXES[view.axis].text(x), ...allAt(curves, x).map(({ y }) => (has(y) ? kind.text(y) : "–"))];
    return table([AXES[view.axis].name, ...heads], positions.map(row));
  }
  const height = (width) => (tall ? (width < 560 ? 300 : 430) : 230);
  return figure({ height, caption, aria, draw, stops, describe, numbers });
}
