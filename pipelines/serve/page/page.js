"use strict";

// Text arrives as server-sent events, and enters the page as text only, never as markup.

const at = (id) => document.getElementById(id);
const numbers = ["max_tokens", "temperature", "top_k", "top_p", "seed"];
let model = null;
let running = null;

function note(text, bad = false) {
  at("note").textContent = text;
  at("note").className = bad ? "bad" : "";
}

function question() {
  const asked = { model, prompt: at("prompt").value, stream: true, stream_options: { include_usage: true } };
  for (const name of numbers) if (at(name).value !== "") asked[name] = Number(at(name).value);
  return asked;
}

// The JSON of each event of a response, until "[DONE]".
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function say(asked, signal) {
  const headers = { "Content-Type": "application/json" };
  const response = await fetch("/v1/completions", { method: "POST", headers, body: JSON.stringify(asked), signal });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const began = performance.now();
  let finish = "";
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    for (const choice of event.choices) {
      at("text").append(choice.text);
      finish = choice.finish_reason || finish;
    }
    if (event.usage) {
      const tokens = event.usage.completion_tokens, seconds = (performance.now() - began) / 1000;
      const end = finish === "stop" ? "the document ends here" : "more tokens would go on";
      note(`${tokens} tokens, ${(tokens / seconds).toFixed(0)} a second; ${end}`);
    }
  }
}

async function go() {
  if (running || !at("form").reportValidity()) return;
  running = new AbortController();
  at("go").disabled = true;
  at("stop").disabled = false;
  at("asked").textContent = at("prompt").value;
  at("text").textContent = "";
  note("…");
  try {
    await say(question(), running.signal);
  } catch (error) {
    if (error.name === "AbortError") note("stopped");
    else note(error.message, true);
  }
  running = null;
  at("go").disabled = false;
  at("stop").disabled = true;
}

async function begin() {
  try {
    const { data } = await (await fetch("/v1/models")).json();
    model = data[0].id;
    at("model").textContent = document.title = model;
  } catch {
    note("the server does not answer", true);
  }
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  go();
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) go();
});
at("stop").addEventListener("click", () => running?.abort());
begin();
