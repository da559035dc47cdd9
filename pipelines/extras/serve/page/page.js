"use strict";

// Text arrives as server-sent events, and enters the page as text only, never as markup.

const at = (id) => document.getElementById(id);
let running = null;
let messages = null; // of the conversation, with a model that was tuned to answer

// A new part of the text: what a user asks, or what the model says.
function part(role) {
  const element = document.createElement("span");
  element.className = role;
  at("answer").append(element);
  return element;
}

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
  const question = at("prompt").value, headers = { "Content-Type": "application/json" };
  const turns = messages && [...messages, { role: "user", content: question }];
  const asked = { ...(turns ? { messages: turns } : { prompt: question }), stream: true };
  asked.stream_options = { include_usage: true };
  for (const { id, value } of document.querySelectorAll("input")) if (value !== "") asked[id] = Number(value);
  if (!turns) at("answer").replaceChildren();
  const texts = ["user", "assistant"].map(part);
  texts[0].append(question);
  const path = turns ? "/v1/chat/completions" : "/v1/completions";
  const response = await fetch(path, { method: "POST", headers, body: JSON.stringify(asked), signal });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const began = performance.now();
  try {
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) texts[1].append(choice.text ?? choice.delta.content);
      if (event.usage) {
        const tokens = event.usage.completion_tokens, seconds = (performance.now() - began) / 1000;
        note(`${tokens} token${tokens === 1 ? "" : "s"}, ${(tokens / seconds).toFixed(0)} a second`);
      }
    }
  } finally {
    if (turns) {
      messages = [...turns, { role: "assistant", content: texts[1].textContent }];
      at("prompt").value = "";
    }
  }
}

at("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  running = new AbortController();
  busy(true);
  note("…");
  try {
    await say(running.signal);
  } catch (error) {
    note(error.name === "AbortError" ? "stopped" : error.message, error.name !== "AbortError");
  }
  busy(false);
});
at("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // composing: Enter chooses a character
  event.preventDefault();
  if (!at("go").disabled) at("form").requestSubmit();
});
at("stop").addEventListener("click", () => running.abort());
at("new").addEventListener("click", () => {
  messages = [];
  at("answer").replaceChildren();
});
fetch("/v1/models").then((response) => response.json()).then(({ data }) => {
  at("model").textContent = document.title = data[0].id;
  at("max_tokens").value = Math.min(100, Math.floor(data[0].context / 2)); // the prompt has the rest
  if (!data[0].chat) return;
  messages = [];
  document.body.className = "chat";
  at("about").textContent = "It was tuned to answer. It knows the conversation below, and nothing else.";
  at("asks").textContent = "Message";
  at("go").textContent = "Send";
  at("prompt").required = true;
  at("prompt").placeholder = "";
  at("new").hidden = false;
}, () => note("the server does not answer", true));
