// --- the text on top

function lead(run) {
  const model = run.size ? `GPT-2 ${run.size}` : `A GPT-2 of ${short(run.parameters)} parameters`;
  if (!run.steps) return `${model}, to be trained on ${run.text}. It has no step yet.`;
  const all = plural(run.max_steps, "step");
  const reached = run.steps >= run.max_steps ? `in ${all}` : `in ${full(run.steps)} of ${all} so far`;
  const { total } = run.account, again = run.starts - 1;
  const cost = costs(run) ? ` and ${paid(total)}` : "";
  const interrupted = again > 0 ? `, was interrupted ${again === 1 ? "once" : `${full(again)} times`} and resumed` : "";
  const hellaswag = has(run.hellaswag) ? ` and its HellaSwag accuracy ${score(run.hellaswag)}` : "";
  const scores = has(run.val_loss) ? ` Its validation loss is ${score(run.val_loss)}${hellaswag}.` : "";
  return `${model}, trained on ${short(run.tokens)} tokens of ${run.text} ${reached}. ` +
    `It took ${seconds(3600 * total.hours)} of billed time${cost}${interrupted}.${scores}`;
}

const called = (source) => (source.overlay ? `${source.name} of llm.c` : source.name);
const listed = (names) => (names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${names.at(-1)}` : names[0]);

// The whole sentence about one run, and the logs beside it.
function leadBeside(run) {
  const log = (one) => `${called(one)}, ` + (has(one.val_loss) ? `with a validation loss of ${score(one.val_loss)} ` : "") +
    `after ${short(tokensBefore(one, one.steps))} tokens`;
  return `${lead(run)} Beside it: ${listed(sources.filter((one) => one.overlay).map(log))}.`;
}

function leads() {
  const names = `${listed(sources.map(called))}, side by side.`;
  if (new Set(page.runs.map((run) => `${run.text} ${run.tokenizer}`)).size > 1)
    return `${names} The runs read different text, so compare their losses with care.`;
  const [best, ...others] = sources.filter((one) => has(one.val_loss)).sort((a, b) => a.val_loss - b.val_loss);
  const lowest = others.length ? ` The lowest validation loss is ${score(best.val_loss)}, of ${called(best)}.` : "";
  return names + lowest + (page.overlays.length ? " A log of llm.c does not name its text." : "");
}
const counted = () => listed([
  plural(page.runs.length, "run"),
  ...(page.overlays.length ? [`${plural(page.overlays.length, "log")} of llm.c`] : []),
]);

function tiles(run) {
  const { total, goodput, usd_per_billion_tokens: rate } = run.account;
  const price = has(rate) ? `${dollars(rate)} per billion tokens` : "";
  const waits = run.attempts.some((a) => a.waited) ? ", without waits for spot" : "";
  const tiles = [
    ["val loss", score(run.val_loss), [
      has(run.bits_per_byte) && `${score(run.bits_per_byte)} bits per byte`,
      has(run.train_loss) && `train ${score(run.train_loss)}`,
    ].filter(Boolean).join(", ")],
    has(run.hellaswag) && ["HellaSwag", score(run.hellaswag), "acc_norm"],
    has(run.core) && ["CORE", score(run.core), "22 tasks, centred"],
    ["tokens", short(run.tokens), plural(run.steps, "step")],
    has(run.tokens_per_second) &&
      ["tokens/s", short(run.tokens_per_second), has(run.mfu) ? `MFU ${percent(run.mfu)}` : "median of steps"],
    ["billed", seconds(3600 * total.hours), plural(run.starts, "start")],
    costs(run) && ["dollars", dollars(total.usd), total.unpriced_hours ? `and ${paid({ ...total, usd: 0 })}` : price],
    has(goodput) && ["goodput", percent(goodput), `of billed time is training${waits}`],
  ].filter(Boolean);
  return el("dl", { class: "tiles" }, tiles.map(([name, value, more]) =>
    el("div", {}, more && el("dd", { class: "more" }, more), el("dt", {}, name), el("dd", {}, value))));
}

function overview() {
  const heads = ["run", "state", "model", "tokens", "val loss", "HellaSwag"];
  const more = ["tokens/s", "starts", "billed", "dollars", "goodput"];
  const scores = (source) => [score(source.val_loss), score(source.hellaswag)];
  const name = (source) => [swatch(source.key, "box"), source.name];
  function row(source) {
    const tokens = short(source.overlay ? tokensBefore(source, source.steps) : source.tokens);
    if (source.overlay) return [name(source), "llm.c's log", "", tokens, ...scores(source), ...more.map(() => "–")];
    const { total, goodput } = source.account;
    return [
      name(source), source.state, source.size ?? short(source.parameters), tokens, ...scores(source),
      has(source.tokens_per_second) ? full(source.tokens_per_second) : "–", full(source.starts),
      seconds(3600 * total.hours), paid(total), has(goodput) ? percent(goodput) : "–",
    ];
  }
  return table([...heads, ...more], sources.map(row), { kind: "runs" });
}

// Warnings for the reader of the present figure.
function caveats() {
  const names = (list) => list.map((source) => source.name).join(", ");
  const bytewise = visible().filter((source) => !source.overlay && source.tokenizer !== "gpt2");
  const absent = visible().filter((source) => Object.keys(source.series).length && !isOn(source, view.axis));
  const logs = absent.filter((source) => source.overlay), unpriced = absent.filter((source) => !source.overlay);
  return [
    bytewise.length > 0 && bytewise.length < visible().length &&
      ` A token of ${names(bytewise)} is a byte: its losses and those of GPT-2's tokens are not on one scale.`,
    logs.length > 0 && ` ${names(logs)} has neither time nor cost, and is not drawn here.`,
    unpriced.length > 0 && ` No price is known for ${names(unpriced)}, which is not drawn here.`,
  ];
}

// --- controls: native inputs, which support keyboard and screen reader

function choice(legend, name, options, chosen, change) {
  const option = ([value, text, disabled]) => el("label", { title: disabled }, text, el("input", {
    type: "radio", name, value, checked: value === chosen, disabled: !!disabled, onchange: () => change(value),
  }));
  return el("fieldset", { class: "choice" }, el("legend", {}, legend),
    el("div", { class: "options" }, options.map(option)));
}

function themes() {
  const root = document.documentElement, chosen = root.getAttribute("data-theme") ?? "";
  return choice("Theme", "theme", [["", "auto"], ["light", "light"], ["dark", "dark"]], chosen, (theme) =>
    (theme ? root.setAttribute("data-theme", theme) : root.removeAttribute("data-theme")));
}

function key(source) {
  const button = el("button", { type: "button", "aria-pressed": `${!view.hidden.has(source.id)}` }, swatch(source.key), source.name);
  return fill(button, {
    onclick: () => {
      if (!view.hidden.delete(source.id)) view.hidden.add(source.id);
      button.setAttribute("aria-pressed", !view.hidden.has(source.id));
      redraw();
    },
  }, []);
}

// Says how to zoom; shows a chosen range, with a button back to the whole.
function rangeShown() {
  const box = el("div", { class: "range" });
  redraws.push(() => {
    const text = AXES[view.axis].text, reset = el("button", { type: "button" }, "Whole run");
    reset.onclick = () => change(null);
    box.replaceChildren(...(view.range ? [`${view.range.map(text).join(" to ")} `, reset] : ["Drag over a figure to zoom"]));
  });
  const change = (range) => {
    view.range = range;
    redraw();
  };
  return box;
}

function controls() {
  const change = (name) => (value) => {
    view[name] = value;
    if (name === "axis") view.range = null;
    redraw();
  };
  const why = { hours: "no run here has billed time", usd: "no run here has a known price for all its hours" };
  const axes = Object.entries(AXES).map(([axis, { name }]) =>
    [axis, name, sources.some((source) => isOn(source, axis)) ? null : why[axis]]);
  const whole = el("input", { type: "checkbox", checked: view.whole, onchange: () => change("whole")(whole.checked) });
  return el("div", { class: "controls" },
    sources.length > 1 && el("div", { class: "keys", role: "group", "aria-label": "Runs shown" }, sources.map(key)),
    choice("Against", "axis", axes, view.axis, change("axis")),
    choice("Axis", "scale", [["linear", "linear"], ["log", "log"]], view.scale, change("scale")),
    el("label", { class: "check" }, whole, "from the first step"), rangeShown());
}

// --- sections

function training() {
  const any = (...metrics) => metrics.some((m) => sources.some((source) => source.series[m] || has(source.final?.[m])));
  if (!sources.some((source) => Object.keys(source.series).length)) return soft("No step was committed yet.");
  const resumed = page.runs.some((run) => run.attempts.some((a) => a.stage === "train" && a.from));
  const evaluated = page.runs.some((run) => has(run.final["val/loss"]));
  const unnamedOf = ({ unnamed }) => unnamed?.length > 0 && ` Lines without room for their names: ${unnamed.join(", ")}.`;
  const loss = (drawn) => [
    "Training loss (lines; a running mean over 1.3% of the steps, with every step's in pale color behind it) and validation ",
    `loss (rings${evaluated ? "; a diamond is the final evaluation" : ""}).`,
    resumed && " Ticks on the axis: a new attempt resumed from the last commit.",
    ["hours", "usd"].includes(view.axis) && " Each point has the cost of all stages and attempts until then.",
    lossesCompare() && " Dotted: OpenAI's GPT-2 weights on llm.c's validation shard of FineWeb; on another part of it, " +
      "or on FineWeb-Edu, they are a guide only.",
    unnamedOf(drawn),
    caveats(),
  ];
  const hellaswag = (drawn) => [
    "HellaSwag in completion style (acc_norm); guessing gets 0.25. Rings: during training; diamond: the final evaluation.",
    usesReferences() && " Dotted: GPT-2 as measured by llm.c, GPT-3 from its paper.",
    unnamedOf(drawn),
    caveats(),
  ];
  const core = (drawn) => [
    "CORE: the mean centred accuracy of DCLM's 22 tasks; guessing gets 0. Rings: during training; diamond: the final evaluation.",
    usesReferences() && " Dotted: GPT-2 as measured by nanochat.",
    unnamedOf(drawn),
    caveats(),
  ];
  const small = [
    ["perf/tokens_per_second", "Throughput, tokens per second", "Tokens per second of each step, over all GPUs."],
    ["perf/mfu", "Model FLOPs utilization", `${page.mfu}.`],
    ["train/lr", "Learning rate", "Learning rate of each step."],
    ["train/grad_norm", "Gradient norm", "Norm of the gradient before clipping."],
  ].filter(([metric]) => any(metric));
  return [
    controls(),
    any("train/loss", "val/loss") &&
      lineFigure({ metrics: ["train/loss", "val/loss"], tall: true, title: "Loss, nats per token", caption: loss }),
    any("eval/hellaswag_acc_norm") &&
      lineFigure({ metrics: ["eval/hellaswag_acc_norm"], title: "HellaSwag accuracy", caption: hellaswag }),
    any("eval/core") && lineFigure({ metrics: ["eval/core"], title: "CORE", caption: core }),
    el("div", { class: "several" },
      small.map(([metric, title, text]) => lineFigure({ metrics: [metric], title, caption: () => [text] }))),
  ];
}

function lineage(run) {
  const artifact = (box) => el("div", { class: box.there === false ? "artifact missing" : "artifact" },
    el("b", {}, box.stage), box.name,
    box.fingerprint && el("span", { class: "mono", title: box.fingerprint }, `${box.fingerprint.slice(0, 16)}…`),
    box.facts.map((fact) => el("div", {}, fact)),
    box.attempts > 0 && el("div", { class: "soft" },
      `${seconds(3600 * box.bill.hours)}, ${plural(box.attempts, "attempt")}`, costs(run) && `, ${paid(box.bill)}`),
    box.bytes && el("div", { class: "soft" }, bytes(box.bytes)));
  const of = (...stages) => run.lineage.filter((box) => stages.includes(box.stage)).map(artifact);
  const began = run.lineage.filter((box) => box.beginning).map(artifact);
  const columns = [of("text"), [...of("tokenize"), ...began], of("train"), of("evaluate", "export")]
    .filter((boxes) => boxes.length);
  return el("ol", { class: "lineage" }, columns.map((boxes) => el("li", {}, boxes)));
}

function receipt(run) {
  const verdict = { true: ["good", "✓ met"], false: ["bad", "✕ missed"], null: ["soft", "not yet"] };
  const amount = (n) => (Number.isInteger(n) ? full(n) : score(n));
  const chip = ([color, text]) => el("span", { class: "chip", color }, text);
  return [
    el("dl", { class: "receipt" }, run.receipt.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    table(["target", "value", "result", ""], run.targets.map(({ what, target, got, met }) =>
      [what, amount(target), amount(got), chip(verdict[met])])),
    el("details", {}, el("summary", {}, "The recipe, with every default"), el("pre", {}, run.recipe)),
  ];
}

function build() {
  const { runs } = page, alone = runs.length === 1, single = sources.length === 1;
  const title = single ? runs[0].name : counted();
  const each = (draw, among = runs) => among.map((run) => [!alone && el("h3", {}, run.name), draw(run)]);
  const worked = runs.filter((run) => run.attempts.length), sampled = runs.filter((run) => run.sample);
  const learning = runs.filter((run) => run.samples.length);
  document.title = `${title} – skytrain report`;
  redraws.length = figures = clips = 0;
  const main = document.getElementById("page");
  main.replaceChildren();
  fill(main, {}, [
    el("header", {},
      el("div", { class: "eyebrow" }, `skytrain report, ${dateTime(page.made)}`),
      el("h1", {}, title, single && [" ", el("span", { class: `chip s-${runs[0].state}` }, runs[0].state)]),
      themes(),
      el("p", {}, single ? lead(runs[0]) : alone ? leadBeside(runs[0]) : leads())),
    single ? tiles(runs[0]) : overview(),
    el("h2", {}, "Training"), training(),
    worked.length > 0 && [el("h2", {}, "Attempts"), worked.map(timeline)],
    el("h2", {}, runs.some(costs) ? "Cost by phase" : "Time by phase"), each(bill),
    sampled.length > 0 && [
      el("h2", {}, "Sample"), soft("Text of the final weights without a prompt."),
      each((run) => el("pre", {}, run.sample), sampled),
    ],
    learning.length > 0 && [
      el("h2", {}, "Samples while training"), soft("Texts without a prompt, always with the same seeds."),
      each((run) => run.samples.map(([step, texts], i) => el("details", { open: i === run.samples.length - 1 },
        el("summary", {}, `After step ${full(step)}, ${short(tokensBefore(run, step))} tokens`),
        texts.map((text) => el("pre", {}, text)))), learning),
    ],
    el("h2", {}, "Lineage"),
    soft("The inputs of each artifact. A fingerprint is the sha256 of everything that determines an artifact's bytes."), each(lineage),
    el("h2", {}, "Receipt"),
    soft("The facts for a repetition of the run, and its targets."), each(receipt),
    el("footer", {}, "Long curves are thinned to 2,000 points that include the extremes; means are computed before. ",
      "Times and dollars come from the attempts' heartbeats. ",
      "This page makes no network request."),
  ]);
  redraw();
}

build();
let width = innerWidth;
addEventListener("resize", () => {
  if (width === innerWidth) return;  // only a phone's address bar changed
  width = innerWidth;
  requestAnimationFrame(redraw);
});
