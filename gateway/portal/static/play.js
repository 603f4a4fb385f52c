// The playground: streams an answer and shows what it takes while it comes.
"use strict";
(() => {
  const form = document.getElementById("play");
  if (!form) return;
  const field = (name) => document.getElementById(name);
  const answer = field("answer");
  const stop = field("stop");
  const send = field("send");
  let running = null;

  const show = (name, words) => { field(name).textContent = words; };
  const milliseconds = (value) => (value >= 1000 ? `${(value / 1000).toFixed(2)} s` : `${value.toFixed(value < 10 ? 1 : 0)} ms`);
  const money = (nano) => `${(nano / 1e9).toFixed(9).replace(/0+$/, "").replace(/\.$/, "")} ${form.dataset.currency}`;

  async function* events(response) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let waiting = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      waiting += value;
      const blocks = waiting.split("\n\n");
      waiting = blocks.pop();
      for (const block of blocks) for (const line of block.split("\n")) {
        if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
      }
    }
  }

  async function receipt(rid) {
    for (let tries = 0; tries < 20; tries += 1) {
      const response = await fetch(`/portal/requests/${rid}/receipt`, { headers: { "hx-request": "true" } });
      if (response.ok && response.headers.get("x-settled") === "1") {
        field("receipt").innerHTML = await response.text();
        document.dispatchEvent(new CustomEvent("htmx:load", { detail: { elt: field("receipt") } }));
        return;
      }
      await new Promise((go) => { setTimeout(go, 250); });
    }
  }

  async function run() {
    const model = field("model").selectedOptions[0];
    const began = performance.now();
    let first = 0;
    let last = 0;
    let tokens = 0;
    let rid = "";
    for (const name of ["ttft", "tpot", "tokens", "path", "cost"]) show(name, "–");
    answer.textContent = "";
    field("receipt").replaceChildren();
    answer.classList.add("live");
    answer.setAttribute("aria-busy", "true");
    running = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    show("state", "Waiting for the first token…");
    try {
      const response = await fetch(`/portal/playground/chat?key=${encodeURIComponent(field("key").value)}`, {
        method: "POST", signal: running.signal,
        headers: { "content-type": "application/json", "x-csrf-token": document.querySelector('meta[name="csrf-token"]').content },
        body: JSON.stringify({
          model: model.value, stream: true, stream_options: { include_usage: true },
          max_tokens: Number(field("most").value), temperature: Number(field("temperature").value),
          messages: [...(field("system").value ? [{ role: "system", content: field("system").value }] : []), { role: "user", content: field("prompt").value }],
        }),
      });
      if (!response.ok) {
        const refusal = (await response.json()).error;
        throw new Error(`${refusal.message} (${refusal.code})`);
      }
      rid = response.headers.get("x-request-id");
      for await (const event of events(response)) {
        if (event.error) throw new Error(`${event.error.message} (${event.error.code})`);
        const delta = event.choices?.[0]?.delta;
        const text = (delta?.reasoning_content || "") + (delta?.content || "");
        if (text) {
          last = performance.now();
          if (!first) { first = last; show("ttft", milliseconds(first - began)); show("state", "Answering…"); }
          tokens += 1;
          answer.append(text);
          show("tokens", String(tokens));
          if (tokens > 1) show("tpot", milliseconds((last - first) / (tokens - 1)));
          if (model.dataset.decode) show("cost", `≥ ${money((tokens * Number(model.dataset.decode)) / 1e6)}`);
        }
        if (event.usage) {
          tokens = event.usage.completion_tokens;
          show("tokens", `${event.usage.prompt_tokens} + ${tokens}`);
          if (tokens > 1 && first) show("tpot", milliseconds((last - first) / (tokens - 1)));
        }
        if (event.pdgate) {
          show("path", form.dataset[event.pdgate.path] || event.pdgate.path || "–");
          show("cost", money(event.pdgate.cost_nano));
        }
      }
      show("state", "Finished.");
    } catch (error) {
      show("state", error.name === "AbortError" ? "Stopped. You pay for what was made until then." : error.message);
      field("state").classList.toggle("bad", error.name !== "AbortError");
    } finally {
      answer.classList.remove("live");
      answer.removeAttribute("aria-busy");
      send.disabled = false;
      stop.disabled = true;
      running = null;
      if (rid) await receipt(rid);
    }
  }

  form.addEventListener("submit", (event) => { event.preventDefault(); field("state").classList.remove("bad"); if (!running) run(); });
  stop.addEventListener("click", () => running?.abort());
  field("prompt").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.metaKey || event.ctrlKey)) form.requestSubmit(); });
})();
