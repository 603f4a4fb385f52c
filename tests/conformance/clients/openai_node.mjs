// The official OpenAI client for Node, as it is. Prints what it saw as one JSON object.
import OpenAI, { toFile } from "openai";

const { PDGATE_URL, PDGATE_API_KEY, PDGATE_MODEL: model } = process.env;
const client = new OpenAI({ baseURL: `${PDGATE_URL}/v1`, apiKey: PDGATE_API_KEY, maxRetries: 0 });
const messages = [{ role: "user", content: "Hello there" }];
const errorOf = async (call) => {
  try {
    await call();
  } catch (error) {
    return [error.constructor.name, error.status, error.code];
  }
};

const chat = await client.chat.completions.create({ model, messages, max_tokens: 5 });
const chunks = [];
for await (const chunk of await client.chat.completions.create({
  model, messages, max_tokens: 5, stream: true, stream_options: { include_usage: true },
})) chunks.push(chunk);
const events = [];
for await (const event of await client.responses.create({
  model, input: "Hello there", max_output_tokens: 5, stream: true,
})) events.push(event);
const response = await client.responses.create({ model, input: "Hello there", max_output_tokens: 5 });
const completion = await client.completions.create({ model, prompt: "One", max_tokens: 4 });
const file = await client.files.create({ file: await toFile(Buffer.from("{}"), "in.jsonl"), purpose: "batch" });
const models = [];
for await (const one of client.models.list()) models.push(one.id);
console.log(JSON.stringify({
  text: chat.choices[0].message.content,
  tokens: chat.usage.completion_tokens,
  streamed: chunks.map((c) => c.choices[0]?.delta?.content ?? "").join(""),
  streamed_tokens: chunks.at(-1).usage.completion_tokens,
  events: events.map((e) => e.type).filter((t) => t !== "response.output_text.delta"),
  response: response.output_text,
  completion: completion.usage.completion_tokens,
  file: file.bytes,
  models,
  errors: {
    key: await errorOf(() => new OpenAI({ baseURL: client.baseURL, apiKey: "pdg_wrong", maxRetries: 0 }).models.list()),
    model: await errorOf(() => client.chat.completions.create({ model: "none", messages })),
  },
}));
