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
const stepsOnly = { axis: "step", scale: "linear" };  // of a step of tuning, which has steps of its own
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
const kindOf = (metric) => LINES[metric] ?? { text: score };  // of tuning
// A run has one color; of a single run, the validation loss has another one.
const colorOf = ({ source, metric }) => (sources.length === 1 && metric === "val/loss" ? "r1" : source.key);
const dashOf = ({ source, metric }) => source.dash ?? (sources.length > 1 && metric === "val/loss" ? "5 3" : null);

// A curve on the chosen axis; a logarithmic axis cannot show values before the first step.
function along(source, curve, look) {
  const x = AXES[look.axis].of(source, curve);
  const begin = x && look.scale === "log" ? x.findIndex((value) => value > 0) : 0;
  return x && begin >= 0 ? { x: x.slice(begin), y: curve.y.slice(begin) } : null;
}

// Lines; rings for metrics of some steps; a dot for the one result of the stage evaluate.
function curvesShown(metrics, look) {
  const found = [];
  for (const source of visible())
    for (const metric of metrics) {
      const { line: mean, raw } = source.series[metric] ?? {};
      const drawn = mean && along(source, mean, look);
      const role = kindOf(metric).rings ? "val" : "train";
      if (drawn) found.push({ source, metric, role, ...drawn, raw: raw && along(source, raw, look) });
      const end = source.series["train/loss"]?.line, value = source.final?.[metric];
      if (!end || !has(value)) continue;
      const [step, hours, usd] = [end.step, end.hours, end.usd].map((column) => column.slice(-1));
      const last = along(source, { step, hours, usd, y: [value] }, look);
      if (last) found.push({ source, metric, role: "evaluate", ...last });
    }
  return found;
}

// The point of each curve nearest to x; none where x is too far outside the curve.
function allAt(curves, x) {
  const slack = 0.01 * Math.max(...curves.map((c) => c.x.at(-1)));
  return curves.map((curve) => {
    const { x: xs, y } = curve, next = xs.findIndex((value) => value >= x);
    if (x < xs[0] - slack || x > xs.at(-1) + slack) return { curve };
    const i = next < 0 ? xs.length - 1 : next && x - xs[next - 1] <= xs[next] - x ? next - 1 : next;
    return { curve, at: xs[i], y: y[i] };
  });
}

const usesReferences = () => visible().some((source) => source.overlay || source.tokenizer === "gpt2");
const lossesCompare = () => usesReferences() && visible().some((source) => source.fineweb);  // of one text only
const referencesOf = (metrics) =>
  metrics.flatMap((metric) => ((metric === "val/loss" ? lossesCompare() : usesReferences()) && page.references[metric]) || []);

// --- from values to pixels

function horizontal(curves, box, look) {
  const log = look.scale === "log", xs = curves.flatMap((c) => [c.x[0], c.x.at(-1)]);
  const first = log ? Math.min(...xs) : 0, last = Math.max(...xs);
  const grow = log ? Math.log10 : (x) => x;
  const position = spread(grow(first), grow(last), box.left, box.right);
  const back = spread(box.left, box.right, grow(first), grow(last));
  return { first, last, X: (x) => position(grow(x)), valueAt: (px) => (log ? 10 ** back(px) : back(px)) };
}

// A linear axis leaves out the losses of the first steps, which would flatten the rest.
function vertical(metrics, curves, box, look) {
  const kind = kindOf(metrics[0]), { floor } = kindOf(metrics.at(-1));
  const whole = look.scale === "log" || kind.whole;
  const late = ({ x, y }) => y.filter((_, i) => whole || x[i] >= x[0] + 0.04 * (x.at(-1) - x[0]));
  const noise = curves.flatMap((c) => (c.raw ? late(c.raw) : [])).sort((a, b) => a - b);
  const most = noise.length ? [0.01, 0.99].map((share) => noise[Math.floor(share * noise.length)]) : [];
  const values = [...curves.flatMap(late), ...most, ...(has(floor) ? [floor] : []), ...(kind.fromZero ? [0] : [])];
  let low = Math.min(...values), high = Math.max(...values);
  const sizes = new Set(visible().map((source) => source.size));
  const own = referencesOf(metrics).filter(([, size]) => sizes.has(size)).map(([, , y]) => y);
  [low, high] = [Math.min(low, ...own), Math.max(high, ...own)];
  const margin = 0.05 * (high - low || Math.abs(high) || 1);
  [low, high] = [kind.fromZero ? 0 : low - margin, high + margin];
  return { low, high, Y: spread(low, high, box.bottom, box.top) };
}

// --- the parts of a figure; `at` holds the box, the scales and the curves

function drawAxes(root, { box, X, Y, first, last, low, high, kind, roomy, tall, look }) {
  const tick = kind.tick ?? ((y) => (Math.abs(y) >= 1000 ? short(y) : `${+y.toPrecision(4)}`));
  for (const y of ticks(low, high, tall ? 7 : 4))
    root.append(line("grid", box.left, Y(y), box.right, Y(y)),
      label(box.left - 8, Y(y) + 4, tick(y), { class: "right" }));
  const log = look.scale === "log", minutes = look.axis === "hours" && last < 1 ? 60 : 1;
  const positions = log ? decades(first * minutes, last * minutes) : ticks(first * minutes, last * minutes, roomy ? 8 : 4);
  for (const position of positions) {
    const x = X(position / minutes);
    root.append(line("axis", x, box.bottom, x, box.bottom + 4),
      label(x, box.bottom + 18, (look.axis === "usd" ? "$" : "") + short(position), { class: "middle" }));
  }
  const { title } = AXES[look.axis];
  const name = (minutes > 1 ? title.replace("hours", "minutes") : title) + (log ? " (log)" : "");
  root.append(line("axis", box.left, box.bottom, box.right, box.bottom),
    label((box.left + box.right) / 2, box.bottom + 36, name, { class: "middle" }));
}

function drawCurves(layer, { box, X, Y, curves, look }) {
  const path = (x, y) => "M" + x.map((value, i) => `${X(value).toFixed(1)} ${Y(y[i]).toFixed(1)}`).join("L");
  for (const c of curves.filter((c) => c.raw))
    layer.append(svg("path", { class: "raw", color: colorOf(c), d: path(c.raw.x, c.raw.y) }));
  if (look === view)
    for (const source of new Set(curves.map((c) => c.source))) layer.append(...resumptions(source, X, box));
  for (const curve of curves) {
    const { role, x, y } = curve, color = colorOf(curve);
    const kind = role === "val" ? "line thin" : "line", mark = role === "evaluate" ? "final" : "ring";
    layer.append(svg("path", { class: kind, color, d: path(x, y), "stroke-dasharray": dashOf(curve) }));
    const r = mark === "ring" ? 2.75 : 5;
    const circle = (value, i) => svg("circle", { class: mark, color, cx: X(value), cy: Y(y[i]), r });
    if (role !== "train" && 7 * x.length <= box.right - box.left) layer.append(...x.map(circle));
  }
}

// A tick on the axis for each later attempt at training.
function resumptions(source, X, box) {
  const [, ...later] = (source.attempts ?? []).filter((a) => a.stage === "train");
  const place = ({ resumed_from, billed_before: { hours, usd } }) =>
    along(source, { step: [resumed_from], hours: [hours], usd: [usd], y: [0] }, view);
  const at = later.filter((a) => a.resumed_from > 0).map(place).filter(Boolean).map((point) => X(point.x[0]));
  return at.filter((x) => x >= box.left).map((x) => line("tick", x, box.bottom - 9, x, box.bottom, { color: source.key }));
}

// Published results: dotted lines with their names at the left end, those of the runs' own size first. One whose name
// would overlap another name is left out.
function drawReferences(layer, { box, Y, low, high, known, kind }) {
  const sizes = new Set(visible().map((source) => source.size)), taken = [];
  const own = ([, size]) => sizes.has(size);
  const ordered = [...known.filter(own), ...known.filter((one) => !own(one))];
  for (const [name, , value] of ordered.filter(([, , y]) => y > low && y < high)) {
    const y = Y(value);
    if (y < box.top + 8 || taken.some((other) => Math.abs(other - y) < 17)) continue;
    taken.push(y);
    layer.append(line("reference", box.left, y, box.right, y),
      label(box.left + 6, y - 4, `${name}: ${kind.text(value)}`, { class: "halo" }));
  }
}

// The last value of each curve at its right end, moved apart where they would overlap. The final evaluation replaces the
// value of its curve, and val loss replaces the training loss of a run.
function drawEnds(root, { X, Y, curves, kind, metrics }) {
  const evaluated = ({ source, metric }) =>
    curves.some((c) => c.role === "evaluate" && c.source === source && c.metric === metric);
  const settled = (c) => c.role === "evaluate" || ((!c.raw || metrics.length === 1) && !evaluated(c));
  const ends = curves.filter(settled).map((c) => ({ c, value: c.y.at(-1), y: Y(c.y.at(-1)) })).sort((a, b) => a.y - b.y);
  ends.forEach((end, i) => { end.y = Math.max(end.y, i ? ends[i - 1].y + 14 : -Infinity); });
  for (const { c, value, y } of ends)
    root.append(label(X(c.x.at(-1)) + 9, y + 4, (kind.end ?? kind.text)(value), { class: "end halo", color: colorOf(c) }));
}

// --- a figure: svg, a cursor for mouse, finger and arrow keys, and a caption

let figures = 0;
const NOTHING = "Nothing to show on this axis.";
function lineFigure({ metrics, tall, title, caption, look = view }) {
  const kind = kindOf(metrics[0]), number = ++figures;
  const tip = el("div", { class: "tip", hidden: true });
  const cursor = el("input", { type: "range", min: 0, max: 1000, step: 20, value: 1000 });
  const canvas = el("div");
  const plot = el("div", { class: "plot" }, canvas, cursor, tip);  // only the canvas is replaced
  const captionBox = el("figcaption");
  let at = null, hair = null;  // the present drawing

  function draw() {
    const width = plot.clientWidth, height = tall ? (width < 560 ? 300 : 430) : 230, roomy = width >= 560;
    const curves = curvesShown(metrics, look);
    const box = { left: 52, right: width - (roomy ? 62 : 10), top: 30, bottom: height - 40 };
    const ends = curves.map(({ source, metric, y }) =>
      `${source.name}, ${metric}: from ${kind.text(y[0])} to ${kind.text(y.at(-1))}`);
    const name = `${title} against ${AXES[look.axis].title}. ${ends.length ? `${ends.join("; ")}.` : NOTHING}`;
    const root = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": name },
      label(0, 14, title, { class: "title" }));
    canvas.replaceChildren(root);
    cursor.setAttribute("aria-label", `Read values along figure ${number}: ${name}`);
    captionBox.replaceChildren();
    fill(captionBox, {}, [el("b", {}, `Figure ${number}. `), caption()]);
    tip.hidden = true;
    at = null;
    if (!curves.length) return root.append(label(width / 2, height / 2, NOTHING, { class: "middle" }));
    const scales = { ...horizontal(curves, box, look), ...vertical(metrics, curves, box, look) };
    at = { box, look, curves, kind, metrics, roomy, tall, known: referencesOf(metrics), ...scales };
    drawAxes(root, at);
    const [x, y, w, h] = [box.left - 5, box.top - 6, Math.max(0, box.right - box.left + 13), box.bottom - box.top + 6];
    const layer = svg("svg", { class: "clip", x, y, width: w, height: h, viewBox: `${x} ${y} ${w} ${h}` });
    root.append(layer);
    drawReferences(layer, at);
    drawCurves(layer, at);
    if (roomy) drawEnds(root, at);
    hair = root.appendChild(svg("g"));
  }

  // Show the values at a pixel; null: nowhere.
  function show(px) {
    tip.hidden = px === null || !at;
    hair?.replaceChildren();
    if (tip.hidden) return;
    const { box, curves, X, Y, valueAt } = at, x = Math.max(box.left, Math.min(box.right, px));
    const points = allAt(curves, valueAt(x)).filter((p) => has(p.y));
    hair.append(line("hair", x, box.top, x, box.bottom), ...points.filter((p) => Y(p.y) >= box.top - 6)
      .map((p) => svg("circle", { class: "final", color: colorOf(p.curve), cx: X(p.at), cy: Y(p.y), r: 4 })));
    const named = ({ curve: { source, role } }) =>
      source.name + (metrics.length > 1 || role === "evaluate" ? ` ${role}` : "");
    const where = AXES[look.axis].text(valueAt(x));
    cursor.setAttribute("aria-valuetext", [where, ...points.map((p) => `${named(p)} ${kind.text(p.y)}`)].join("; "));
    tip.replaceChildren(el("b", {}, where), ...points.map((p) => el("div", {},
      swatch(colorOf(p.curve)), named(p), el("span", { class: "value" }, kind.text(p.y)))));
    const left = x > plot.clientWidth / 2 ? x - tip.offsetWidth - 14 : x + 14;
    tip.style.left = `${Math.max(0, Math.min(plot.clientWidth - tip.offsetWidth, left))}px`;
  }

  const atPointer = (event) => show(event.clientX - plot.getBoundingClientRect().left);
  const atCursor = () => at && show(at.box.left + ((at.box.right - at.box.left) * cursor.value) / 1000);
  fill(plot, { onpointermove: atPointer, onpointerdown: atPointer, onpointerleave: () => show(null) }, []);
  fill(cursor, { oninput: atCursor, onfocus: atCursor, onblur: () => show(null) }, []);
  redraws.push(draw);
  return el("figure", {}, plot, captionBox);
}
