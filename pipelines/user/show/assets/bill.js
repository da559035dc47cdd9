// --- attempts, and the bill

const STATES = {
  done: ["✓", "finished"],
  running: ["●", "running"],
  interrupted: ["▼", "interrupted, after saving"],
  stopped: ["■", "stopped on request"],
  lost: ["✕", "crashed without a last heartbeat"],
  failed: ["!", "failed"],
  stale: ["⤳", "superseded by a later attempt"],
};
const PHASES = {  // in this order; each has a color of its name
  train: "steps that count",
  evaluate: "held-out loss and scores",
  tokenize: "text to tokens",
  export: "write the Hugging Face checkpoint",
  checkpoint: "training waits for a checkpoint",
  upload: "results to the store",
  provision: "the machine boots",
  start: "the command starts, and reads the store",
  setup: "ranks start and import",
  download: "download of tokens, weights and commits",
  load: "tuning reads its weights",
  compile: "first step of each attempt, with the compiler",
  data: "training waits for shards",
  idle: "billed, without any work",
  redone: "steps repeated after a loss",
  lost: "after the last heartbeat",
  traffic: "bytes between the machines and the store",
  release: "from the last heartbeat until SkyPilot has removed the machine",
};
const phaseColor = (phase) => (PHASES[phase] ? `p-${phase}` : "soft");
const inOrder = (phases) => [...new Set([...Object.keys(PHASES), ...Object.keys(phases)])].filter((p) => phases[p] > 0);

// A bar with a piece for each phase; `width` in percent of its box.
function phaseBar(values, width, describe) {
  const all = Object.values(values).reduce((sum, value) => sum + value, 0) || 1;
  const bar = el("div", { class: "bar", "aria-hidden": "true" }, inOrder(values).map((phase) => {
    const piece = el("span", { color: phaseColor(phase), title: `${phase}: ${describe(phase)}` });
    piece.style.flexGrow = (100 * values[phase]) / all;  // a sum below 1 would not fill the bar
    return piece;
  }));
  bar.style.width = `${width}%`;
  return bar;
}

function timeline(run) {
  const lasted = (a) => Object.values(a.phases).reduce((sum, s) => sum + s, 0);
  const longest = Math.max(...run.attempts.map(lasted));
  const heads = ["attempt", "phases", "ended", "started", "billed", "steps", "machine", "dollars"];
  function row(a) {
    const [mark, text] = STATES[a.state] ?? ["", a.state];
    const price = has(a.price_per_hour) ? `${dollars(a.price_per_hour)} an hour` : "price unknown";
    return [
      `${a.stage} ${a.attempt}`,
      phaseBar(a.phases, (100 * lasted(a)) / (longest || 1), (phase) => seconds(a.phases[phase])),
      [el("span", { class: `chip s-${a.state}` }, `${mark} ${text}`), a.notice && `: ${a.notice}`],
      dateTime(a.started),
      seconds(lasted(a)),
      has(a.resumed_from) ? `${full(a.resumed_from)} → ${full(a.step ?? a.resumed_from)}` : "",
      [a.nodes > 1 && `${a.nodes} x `, a.machine, el("span", { class: "soft" }, ` ${price} (${a.price_source})`)],
      paid(a.bill),
    ];
  }
  return table(heads, run.attempts.map(row), { kind: "attempts", wrapped: [1, 2, 6] });
}

const worth = (run) => (hasPrice(run) ? (bill) => bill.usd : (bill) => 3600 * bill.hours);
const billed = (run) => Object.values(run.account.by_phase).reduce((sum, bill) => sum + worth(run)(bill), 0);

// Bars of several runs share a scale, dollars with dollars.
function bill(run) {
  const { by_phase, total } = run.account, value = worth(run), all = billed(run);
  if (!all) return soft("Nothing was billed yet.");
  const values = Object.fromEntries(Object.entries(by_phase).map(([phase, cost]) => [phase, value(cost)]));
  const most = Math.max(...page.runs.filter((other) => hasPrice(other) === hasPrice(run)).map(billed));
  const money = (b) => (costs(run) ? [paid(b)] : []);
  const row = (name, b) => [name, seconds(3600 * b.hours), ...money(b), percent(value(b) / all)];
  const name = (phase) =>
    [swatch(phaseColor(phase), "box"), phase, " ", el("span", { class: "soft" }, PHASES[phase] ?? "")];
  const rows = [...inOrder(values).map((phase) => row(name(phase), by_phase[phase])), row(el("b", {}, "all"), total)];
  const heads = ["phase", "time", ...(costs(run) ? ["dollars"] : []), "share"];
  const bar = phaseBar(values, (100 * all) / most, (phase) => paid(by_phase[phase]));
  return [bar, table(heads, rows, { wrapped: [0] }), notes(run)];
}

function notes(run) {
  const { by_market, interruptions, waits, savings_usd, deaths, unseen_seconds, unseen_usd } = run.account;
  const both = (b) => `${costs(run) ? `${paid(b)} in ` : ""}${seconds(3600 * b.hours)}`;
  const markets = Object.entries(by_market).map(([market, b]) => `${market} ${both(b)}`);
  return [
    markets.length > 1 && `By market: ${markets.join(", ")}.`,
    interruptions.hours > 0 &&
      `Interruptions cost ${both(interruptions)}: repeated work, lost time, and restarts.`,
    waits.hours > 0 && `${both(waits)} of waits for spot are in no row of the attempts.`,
    has(savings_usd) && `${dollars(savings_usd)} saved against the on-demand price of the same machines.`,
    deaths > 0 && `${plural(deaths, "attempt")} crashed without a last heartbeat: up to ` +
      `${costs(run) ? `${dollars(unseen_usd)} in ` : ""}${seconds(unseen_seconds)} of them may be missing here.`,
    ...run.faults,
  ].filter(Boolean).map((note) => soft(note));
}
