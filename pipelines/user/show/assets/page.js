// --- the text on top

// The last step of tuning whose exact answers were counted.
const answering = (run) => run.tunings.findLast(({ facts }) => has(facts["tune/exact"]));

function lead(run) {
  const model = run.size ? `GPT-2 ${run.size}` : `A model of ${short(run.parameters)} parameters`;
  if (!run.steps) return `${model}, to be trained on ${run.text}. It has no step yet.`;
  const all = plural(run.max_steps, "step"), again = run.attempt_count - 1;
  const reached = run.steps >= run.max_steps ? all : `${full(run.steps)} of ${all} so far`;
  const interrupted = again > 0 ? ` It was interrupted ${again === 1 ? "once" : `${full(again)} times`} and resumed.` : "";
  const { stage, facts } = answering(run) ?? {}, exact = (name) => score(facts[name]);
  const tuned = facts ? ` Tuned to answer: exact answers ${exact("tune/exact_before")} → ${exact("tune/exact")} by ${stage}.` : "";
  return `${model}, trained on ${short(run.tokens)} tokens of ${run.text} in ${reached}.${tuned}${interrupted}`;
}

function caution() {
  const texts = new Set(page.runs.map((run) => `${run.text} ${run.tokenizer}`));
  if (texts.size > 1) return "The runs read different text, so compare their losses with care.";
  return page.overlays.length ? "A log of llm.c does not name its text, so compare losses with care." : "";
}

function tiles(run) {
  const { total, goodput, usd_per_billion_tokens: rate } = run.account;
  const price = has(rate) ? `${dollars(rate)} per billion tokens` : "";
  const waits = run.account.waits.hours > 0 ? ", without waits for spot" : "";
  const tuned = answering(run)?.facts;
  const tiles = [
    tuned && ["exact answers", percent(tuned["tune/exact"]), `${percent(tuned["tune/exact_before"])} before`],
    ["val loss", score(run.val_loss), [
      has(run.bits_per_byte) && `${score(run.bits_per_byte)} bits per byte`,
      has(run.train_loss) && `train ${score(run.train_loss)}`,
    ].filter(Boolean).join(", ")],
    has(run.hellaswag_acc_norm) && ["HellaSwag", score(run.hellaswag_acc_norm), "acc_norm"],
    has(run.core) && ["CORE", score(run.core), "22 tasks, centred"],
    ["tokens", short(run.tokens), plural(run.steps, "step")],
    has(run.tokens_per_second) &&
      ["tokens/s", short(run.tokens_per_second), has(run.mfu) ? `MFU ${percent(run.mfu)}` : "median of steps"],
    ["billed", seconds(3600 * total.hours), plural(run.attempt_count, "attempt")],
    costs(run) && ["dollars", dollars(total.usd), total.unpriced_hours ? `and ${paid({ ...total, usd: 0 })}` : price],
    has(goodput) && ["goodput", percent(goodput), `of billed time is training${waits}`],
  ].filter(Boolean);
  return el("dl", { class: "tiles" }, tiles.map(([name, value, more]) =>
    el("div", {}, more && el("dd", { class: "more" }, more), el("dt", {}, name), el("dd", {}, value))));
}

function overview() {
  const measured = sources.some((source) => has(source.hellaswag_acc_norm));
  const heads = ["run", "state", "model", "tokens", "val loss", ...(measured ? ["HellaSwag"] : [])];
  const more = ["tokens/s", "attempts", "billed", "dollars", "goodput"];
  const scores = (source) => [score(source.val_loss), ...(measured ? [score(source.hellaswag_acc_norm)] : [])];
  const name = (source) => source.page ? el("a", { href: source.page }, source.name) : [swatch(source.key, "box"), source.name];
  function row(source) {
    const tokens = short(source.overlay ? tokensBefore(source, source.steps) : source.tokens);
    if (source.overlay) return [name(source), "llm.c's log", "", tokens, ...scores(source), ...more.map(() => "–")];
    const { total, goodput } = source.account;
    return [
      name(source), source.state, source.size ?? short(source.parameters), tokens, ...scores(source),
      has(source.tokens_per_second) ? full(source.tokens_per_second) : "–", full(source.attempt_count),
      seconds(3600 * total.hours), paid(total), has(goodput) ? percent(goodput) : "–",
    ];
  }
  return table([...heads, ...more], sources.map(row), { kind: "runs" });
}

// --- controls: native inputs, which support keyboard and screen reader

function choice(text, name, options) {
  const option = ([value, title, disabled]) => el("option", { value, disabled, selected: value === view[name] }, title);
  const onchange = (event) => {
    view[name] = event.target.value;
    redraw();
  };
  return el("label", {}, text, el("select", { name, onchange }, options.map(option)));
}

function toggle(source) {
  const onchange = (event) => {
    source.hidden = !event.target.checked;
    redraw();
  };
  return el("label", {}, el("input", { type: "checkbox", checked: true, onchange }), swatch(source.key), source.name);
}

function controls() {
  const axes = Object.entries(AXES).map(([axis, { name }]) => [axis, name, !sources.some((source) => isOn(source, axis))]);
  return el("div", { class: "controls" }, sources.length > 1 && sources.map(toggle),
    choice("Against", "axis", axes), choice("Axis", "scale", [["linear", "linear"], ["log", "log"]]));
}

// --- sections

function training() {
  const any = (...metrics) => metrics.some((m) => sources.some((source) => source.series[m] || has(source.final?.[m])));
  if (!sources.some((source) => Object.keys(source.series).length)) return soft("No step was committed yet.");
  const resumed = page.runs.some((run) => run.attempts.some((a) => a.stage === "train" && a.resumed_from));
  const caption = () => {
    const absent = visible().filter((source) => Object.keys(source.series).length && !isOn(source, view.axis));
    return [
      single && swatch("r0"), " Training loss (lines; a running mean over 1.3% of the steps, with every step's in pale color ",
      "behind it) and ", single && swatch("r1"), ` validation loss (${single ? "" : "dashed, with "}rings; a dot is the final evaluation).`,
      resumed && " Ticks on the axis: a new attempt resumed from the last commit.",
      ["hours", "usd"].includes(view.axis) && " Each point has the cost of all stages and attempts until then.",
      lossesCompare() && " Dotted: OpenAI's GPT-2 weights on llm.c's validation shard of FineWeb; on another part of it, " +
        "or on FineWeb-Edu, they are a guide only.",
      absent.length > 0 && ` Not drawn, without known ${AXES[view.axis].name}: ${absent.map(({ name }) => name).join(", ")}.`,
    ];
  };
  const scores = [
    ["eval/hellaswag_acc_norm", "HellaSwag accuracy", "HellaSwag in completion style (acc_norm); guessing gets 0.25.",
      " Dotted: GPT-2 as measured by llm.c, GPT-3 from its paper."],
    ["eval/core", "CORE", "The mean centred accuracy of DCLM's 22 tasks; guessing gets 0.",
      " Dotted: GPT-2 as measured by nanochat."],
  ].filter(([metric]) => any(metric));
  const small = [
    ["perf/tokens_per_second", "Throughput, tokens per second", "Tokens per second of each step, of all ranks together."],
    ["perf/mfu", "Model FLOPs utilization", `${page.mfu}.`],
    ["train/lr", "Learning rate", "Learning rate of each step."],
    ["train/grad_norm", "Gradient norm", "Norm of the gradient before clipping."],
  ].filter(([metric]) => any(metric));
  return [
    controls(),
    any("train/loss", "val/loss") &&
      lineFigure({ metrics: ["train/loss", "val/loss"], tall: true, title: "Loss, nats per token", caption }),
    scores.map(([metric, title, text, dotted]) =>
      lineFigure({ metrics: [metric], title, caption: () => [text, usesReferences() && dotted] })),
    el("div", { class: "several" },
      small.map(([metric, title, text]) => lineFigure({ metrics: [metric], title, caption: () => [text] }))),
  ];
}

// The steps of tuning, the last one first: what changed, an answer, and the curve of its reward.
function tuning() {
  const metrics = new Map(runs.flatMap((run) => run.tunings.map(({ stage, metric }) => [stage, metric])));
  const made = (stage) => (run) => run.tunings.filter((one) => one.stage === stage).map(({ changes, facts }) => [
    soft(alone ? "" : `${run.name}: `, facts.method ? changes.join(", ") : "not finished"), facts.sample && el("pre", {}, facts.sample),
  ]);
  return [...metrics].reverse().map(([stage, metric]) => [
    el("h3", {}, stage), runs.map(made(stage)),
    metric && lineFigure({ metrics: [metric], title: metric, look: stepsOnly,
      caption: () => [`The ${metric.endsWith("reward") ? "mean reward" : "loss"} of each step of ${stage}.`] }),
  ]);
}

function samples(run) {
  const then = run.samples.map(([step, texts]) => [`After step ${full(step)}, ${short(tokensBefore(run, step))} tokens`, texts]);
  const all = run.sample ? [...then, ["Of the final weights", [run.sample]]] : then;
  return all.map(([title, texts], i) => el("details", { open: i === all.length - 1 },
    el("summary", {}, title), texts.map((text) => el("pre", {}, text))));
}

function receipt(run) {
  return [
    el("dl", { class: "receipt" }, run.receipt.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    el("details", {}, el("summary", {}, "The recipe, with every default"), el("pre", {}, run.recipe)),
  ];
}

// --- the page

const { runs } = page, alone = runs.length === 1, single = sources.length === 1;
const heading = single ? runs[0].name : plural(sources.length, "run") + (page.links ? "" : " side by side");
const each = (draw, among = runs) => among.map((run) => [!alone && el("h3", {}, run.name), draw(run)]);
const sampled = runs.filter((run) => run.sample || run.samples.length);
const sections = () => [
  runs.some((run) => run.tunings.length) && [el("h2", {}, "Tuning"), tuning()],
  el("h2", {}, "Training"), training(),
  el("h2", {}, "Attempts"),
  soft("Bars have the colors of the phases below, not in order of time."), each(timeline),
  el("h2", {}, runs.some(costs) ? "Cost by phase" : "Time by phase"), each(bill),
  sampled.length > 0 && [
    el("h2", {}, "Samples"), soft("Texts without a prompt, always with the same seeds."), each(samples, sampled),
  ],
  el("h2", {}, "Receipt"),
  soft("The facts for a repetition of the run."), each(receipt),
  page.differences.length > 0 && [
    el("h2", {}, "Differences"), soft("The fields in which the recipes differ."),
    table(["field", ...runs.map((run) => run.name)], page.differences.map(([field, values]) => [field, ...values]),
      { wrapped: runs.map((_, i) => i + 1) }),
  ],
];
document.title = `${heading} – skytrain report`;
fill(document.getElementById("page"), {}, [
  el("header", {},
    el("div", { class: "eyebrow" }, `skytrain report, ${dateTime(page.made)}`),
    el("h1", {}, heading, single && [" ", el("span", { class: `chip s-${runs[0].state}` }, runs[0].state)]),
    el("p", {}, single ? lead(runs[0]) : caution())),
  single ? tiles(runs[0]) : overview(),
  !page.links && sections(),
  el("footer", {}, "Long curves are thinned to 2,000 points that include the extremes; means are computed before. ",
    "Times and dollars come from the attempts' heartbeats. This page makes no network request."),
]);
redraw();
let width = innerWidth;
addEventListener("resize", () => {
  if (width === innerWidth) return;  // only a phone's address bar changed
  width = innerWidth;
  requestAnimationFrame(redraw);
});
