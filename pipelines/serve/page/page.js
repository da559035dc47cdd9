"use strict";

// Text arrives as server-sent events, and enters the page as text only, never as markup.

const at = (id) => document.getElementById(id);
let running = null;

function note(text, bad = false) {
  at("note").textContent = text;
  at("note").className = bad ? "bad" : "";
}

function busy(is) {
  at("go").disabled = is;
  at("stop").disabled = !is;
}

// The JSON of each event of a response, until "[DONE]".
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) if (line !== "data: [DONE]") yield JSON.parse(line.replace(/^data: /, ""));
  }
}

async function say(signal) {
  const asked = { prompt: at("prompt").value, stream: true, stream_options: { include_usage: true } };
  for (const { id, value } of document.querySelectorAll("input")) if (value !== "") asked[id] = Number(value);
  const headers = { "Content-Type": "application/json" };
  const response = await fetch("/v1/completions", { method: "POST", headers, body: JSON.stringify(asked), signal });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const began = performance.now();
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    for (const choice of event.choices) at("text").append(choice.text);
    if (event.usage) {
      const tokens = event.usage.completion_tokens, seconds = (performance.now() - began) / 1000;
      note(`${tokens} tokens, ${(tokens / seconds).toFixed(0)} a second`);
    }
  }
}

at("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  running = new AbortController();
  busy(true);
  at("asked").textContent = at("prompt").value;
  at("text").textContent = "";
  note("…");
  try {
    await say(running.signal);
  } catch (error) {
    note(error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
  }
  busy(false);
});
at("stop").addEventListener("click", () => running.abort());
fetch("/v1/models").then((response) => response.json()).then(({ data }) => {
  at("model").textContent = document.title = data[0].id;
}, () => note("the server does not answer", true));
