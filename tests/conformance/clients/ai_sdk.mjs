// Vercel's AI SDK, as it is: over chat completions, responses and Anthropic's messages.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const { PDGATE_URL, PDGATE_API_KEY: apiKey, PDGATE_MODEL: model } = process.env;
const baseURL = `${PDGATE_URL}/v1`;
const openai = createOpenAI({ baseURL, apiKey });
const models = {
  compatible: createOpenAICompatible({ name: "pdgate", baseURL, apiKey, includeUsage: true })(model),
  chat: openai.chat(model),
  responses: openai.responses(model),
  anthropic: createAnthropic({ baseURL, apiKey })(model),
};
const seen = {};
for (const [name, one] of Object.entries(models)) {
  const options = { model: one, prompt: "Hello there", maxOutputTokens: 5, maxRetries: 0 };
  const whole = await generateText(options);
  let failure = null;
  const stream = streamText({ ...options, onError: ({ error }) => { failure = String(error); } });
  let streamed = "";
  for await (const piece of stream.textStream) streamed += piece;
  seen[name] = {
    text: whole.text,
    finish: whole.finishReason,
    tokens: whole.usage.outputTokens,
    streamed,
    streamed_tokens: (await stream.usage).outputTokens,
    failure,
  };
}
console.log(JSON.stringify(seen));
