// --- attempts on the clock

const STATES = {
  done: ["✓", "finished"],
  running: ["●", "running"],
  interrupted: ["▼", "interrupted, after saving"],
  stopped: ["■", "stopped on request"],
  lost: ["✕", "died without a last heartbeat"],
  failed: ["!", "failed"],
  stale: ["⤳", "superseded by a later attempt"],
  waiting: ["…", "waited for spot"],
};
const stateOf = (a) => (a.waited ? "waiting" : a.state);
const PHASES = {  // in this order: color and meaning
  train: ["train", "steps that count"],
  evaluate: ["evaluate", "val loss, HellaSwag and CORE"],
  tokenize: ["evaluate", "text to tokens"],
  export: ["evaluate", "write the Hugging Face checkpoint"],
  checkpoint: ["save", "training waits for a checkpoint"],
  upload: ["save", "results to the store"],
  provision: ["prepare", "the machine boots"],
  setup: ["prepare", "processes start, import, and read the store"],
  download: ["prepare", "download of tokens, weights and commits"],
  compile: ["prepare", "first step of each attempt, with the compiler"],
  data: ["idle", "training waits for shards"],
  idle: ["idle", "billed, without any work"],
  redone: ["redone", "steps repeated after a loss"],
  lost: ["waste", "after the last heartbeat"],
  traffic: ["save", "bytes between the machines and the store"],
  outside: ["waste", "machines up outside all attempts, by SkyPilot's clock"],
};
const phaseColor = (phase) => PHASES[phase]?.[0] ?? "prepare";
const inOrder = (phases) => [...new Set([...Object.keys(PHASES), ...Object.keys(phases)])].filter((p) => p in phases);
const TICKS = [  // a unit, its seconds, and its possible numbers between two ticks
  ["s", 1, [0.1, 0.2, 0.5, 1, 2, 5, 10]],
  ["min", 60, [0.5, 1, 2, 5, 10]],
  ["h", 3600, [0.5, 1, 2, 3, 6]],
  ["d", 86400, [0.5, 1, 2, 5, 10, 20, 50, 100]],
].flatMap(([unit, size, steps]) => steps.map((step) => ({ unit, size, step })));
const LANE = 46;  // pixels of a stage: marks, bars, and the strip of phases

// Wall-clock time to pixels. A long pause is shortened, with a mark.
function clock(attempts, left, right) {
  const spans = [];
  for (const { started, ended } of attempts)
    if (spans.length && started <= spans.at(-1).ended) spans.at(-1).ended = Math.max(spans.at(-1).ended, ended);
    else spans.push({ started, ended });
  const busy = spans.reduce((sum, span) => sum + span.ended - span.started, 0) || 1;
  const pauses = spans.slice(1).map((span, i) => ({ from: spans[i].ended, to: span.started }));
  const cut = pauses.filter(({ from, to }) => to - from > 0.2 * busy);
  const length = (pause) => (cut.includes(pause) ? 0.06 * busy : pause.to - pause.from);
  const scale = (right - left) / (busy + pauses.reduce((sum, pause) => sum + length(pause), 0));
  function at(t) {
    let x = left;
    spans.forEach(({ started, ended }, i) => {
      if (t > started) x += scale * (Math.min(t, ended) - started);
      const pause = pauses[i];
      if (pause && t > ended) x += scale * length(pause) * Math.min(1, (t - ended) / (pause.to - ended));
    });
    return x;
  }
  return { at, cut, busy };
}

// After a shortened pause the clock starts at 0 again: the time since the first start would explain little.
function drawClock(root, attempts, { at, cut, busy }, box, count) {
  const end = Math.max(...attempts.map((a) => a.ended));
  const { unit, size, step } = TICKS.find((tick) => busy / (tick.step * tick.size) <= count) ?? TICKS.at(-1);
  const begins = [attempts[0].started, ...cut.map(({ to }) => to)], ends = [...cut.map(({ from }) => from), end];
  let free = -Infinity;
  begins.forEach((zero, part) => {
    for (let i = 0; zero + i * step * size <= ends[part]; i++) {
      const x = at(zero + i * step * size);
      if (x < free) continue;
      free = x + 54;
      root.append(line("axis", x, box.bottom, x, box.bottom + 4),
        label(x, box.bottom + 18, i ? `${+(i * step).toFixed(1)} ${unit}` : "0", { class: "middle" }));
    }
  });
  root.append(line("axis", box.left, box.bottom, box.right, box.bottom));
  for (const { from, to } of cut) {
    const x = (at(from) + at(to)) / 2;
    root.append(line("reference", x, box.top, x, box.bottom),
      label(x, box.top - 3, `${seconds(to - from)} later`, { class: "middle halo" }));
  }
}

function drawAttempt({ a, x, y, width }) {
  const open = a.state === "running", number = `#${a.number}`;
  const group = svg("g", { class: `s-${stateOf(a)}` },
    svg("rect", { class: open ? "bar open" : "bar", x, y: y + 11, width, height: 14, rx: Math.min(3, width / 2) }),
    width > 10 + 8 * number.length && label(x + 5, y + 22, number, { class: open ? null : "inbar" }),
    label(x + width, y + 8, STATES[stateOf(a)]?.[0] ?? "", { class: width < 12 ? "mark middle" : "mark right" }));
  const all = lasted(a) || 1;
  let from = x;
  for (const phase of inOrder(a.phases)) {
    const part = (width * a.phases[phase]) / all;
    group.append(svg("rect", { class: "bar", color: phaseColor(phase), x: from, y: y + 27, width: part, height: 5 }));
    from += part;
  }
  return group;
}

// Seconds of an attempt, or of several in one bar, without the pauses between them.
const lasted = (a) => Object.values(a.phases).reduce((sum, s) => sum + s, 0);
const ending = (a) => `${STATES[stateOf(a)]?.[1] ?? a.state}${a.notice ? `: ${a.notice}` : ""}`;
const steps = (a, to) => (has(a.from) ? `${full(a.from)} ${to} ${full(a.to ?? a.from)}` : "");
function machine(a) {
  const price = has(a.price_per_hour) ? `${paid(a.bill)} at ${dollars(a.price_per_hour)} an hour` : "price unknown";
  return `${a.nodes > 1 ? `${a.nodes} x ` : ""}${a.machine}: ${price} (${a.price_source})`;
}

function timeline(run) {
  const { attempts } = run;
  const stages = [...new Set(attempts.map((a) => a.stage))];
  const states = [...new Set(attempts.map(stateOf))];
  const aria = () => `Attempts of ${run.name} on the clock: ` +
    `${attempts.map((a) => `${a.stage} ${a.number} ${ending(a)}, ${seconds(lasted(a))}`).join("; ")}.`;
  function draw(root, width, height) {
    const box = { left: width < 560 ? 62 : 76, right: width - 8, top: 14, bottom: height - 26 };
    const time = clock(attempts, box.left, box.right);
    const top = (stage) => box.top + LANE * stages.indexOf(stage);
    for (const stage of stages)
      root.append(label(0, top(stage) + 23, stage),
        line("grid", box.left, top(stage) + 36, box.right, top(stage) + 36));
    drawClock(root, attempts, time, box, width < 560 ? 4 : 9);
    const bars = attempts.map((a) => {
      const x = time.at(a.started);
      return { a, x, y: top(a.stage), width: Math.max(2.5, time.at(a.ended) - x - 1) };
    });
    root.append(...bars.map(drawAttempt));
    const mark = ({ bar: { x, y, width: w } }) =>
      [svg("rect", { class: "hair", fill: "none", x: x - 2, y: y + 9, width: w + 4, height: 25, rx: 4 })];
    return { ...box, bars, mark };
  }
  function stops({ bars }, px) {
    const distance = ({ x, width }) => Math.max(0, x - px, px - x - width);
    const bar = bars.reduce((best, each) => (distance(each) < distance(best) ? each : best));
    return { bar, x: Math.min(bar.x + bar.width, Math.max(bar.x, px)) };
  }
  const describe = ({ bar: { a } }) => [
    [el("b", {}, `${a.stage}, attempt ${a.number}`)],
    [`${STATES[stateOf(a)]?.[0] ?? ""} ${ending(a)}`],
    [`${dateTime(a.started)}, billed for ${seconds(lasted(a))}`],
    ...(has(a.from) ? [[`steps ${steps(a, "to")}`]] : []),
    [machine(a)],
    ...inOrder(a.phases).filter((phase) => a.phases[phase] >= 0.05).map((phase) =>
      [swatch(phaseColor(phase)), phase, el("span", { class: "value" }, seconds(a.phases[phase]))]),
  ];
  const caption = () => [
    `The attempts of ${run.name} over time. A bar is an attempt`,
    states.includes("waiting") && ", or several waits for spot",
    ": ",
    states.map((state, i) => [
      i ? ", " : "", el("span", { class: `chip s-${state}` }, (STATES[state] ?? [state]).join(" ")),
    ]),
    ". The strip below a bar shows its seconds by phase, in the colors of the bill, not in order of time.",
  ];
  const heads = ["attempt", "ended", "started", "billed", "steps", "machine", "dollars"];
  const row = (a) => [
    `${a.stage} ${a.number}`, ending(a), dateTime(a.started), seconds(lasted(a)), steps(a, "→"), a.machine,
    paid(a.bill),
  ];
  const numbers = () => table(heads, attempts.map(row), { wrapped: [1] });
  return figure({ height: () => LANE * stages.length + 44, caption, aria, draw, stops, describe, numbers });
}

// --- the bill

const worth = (run) => (hasPrice(run) ? (bill) => bill.usd : (bill) => 3600 * bill.hours);
const billed = (run) => Object.values(run.account.by_phase).reduce((sum, bill) => sum + worth(run)(bill), 0);

// Bars of several runs share a scale, dollars with dollars.
function bill(run) {
  const { by_phase, total } = run.account, value = worth(run), all = billed(run);
  if (!all) return soft("Nothing was billed yet.");
  const phases = inOrder(by_phase).filter((phase) => value(by_phase[phase]) > 0);
  const most = Math.max(...page.runs.filter((other) => hasPrice(other) === hasPrice(run)).map(billed));
  const bar = el("div", { class: "bill", "aria-hidden": "true" }, phases.map((phase) => {
    const piece = el("span", { color: phaseColor(phase), title: `${phase}: ${paid(by_phase[phase])}` });
    piece.style.flexGrow = (100 * value(by_phase[phase])) / all;  // a sum below 1 would not fill the bar
    return piece;
  }));
  bar.style.width = `${(100 * all) / most}%`;
  const money = (b) => (costs(run) ? [paid(b)] : []);
  const row = (name, b) => [name, seconds(3600 * b.hours), ...money(b), percent(value(b) / all)];
  const name = (phase) =>
    [swatch(phaseColor(phase), "box"), phase, " ", el("span", { class: "soft" }, PHASES[phase]?.[1] ?? "")];
  const rows = [...phases.map((phase) => row(name(phase), by_phase[phase])), row(el("b", {}, "all"), total)];
  const heads = ["phase", "time", ...(costs(run) ? ["dollars"] : []), "share"];
  return [bar, table(heads, rows, { wrapped: [0] }), notes(run)];
}

function notes(run) {
  const { by_market, interruptions, late_data, savings_usd, deaths, unseen_seconds, unseen_usd } = run.account;
  const both = (b) => `${costs(run) ? `${paid(b)} in ` : ""}${seconds(3600 * b.hours)}`;
  const markets = Object.entries(by_market).map(([market, b]) => `${market} ${both(b)}`);
  return [
    markets.length > 1 && `By market: ${markets.join(", ")}.`,
    interruptions.hours > 0 &&
      `Interruptions cost ${both(interruptions)}: repeated work, lost time, and restarts.`,
    late_data >= 0.001 &&
      `The data was late: ${percent(late_data)} of the time of training, the GPUs waited for shards.`,
    has(savings_usd) && `${dollars(savings_usd)} saved against the on-demand price of the same machines.`,
    deaths > 0 && `${plural(deaths, "attempt")} died without a last heartbeat: up to ` +
      `${costs(run) ? `${dollars(unseen_usd)} in ` : ""}${seconds(unseen_seconds)} of them may be missing here.`,
    ...run.faults,
  ].filter(Boolean).map((note) => soft(note));
}
