// Vercel's AI SDK, as it is: objects and tool calls.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, tool } from "ai";
import { z } from "zod";

const { PDGATE_URL, PDGATE_API_KEY: apiKey, PDGATE_MODEL: model } = process.env;
const baseURL = `${PDGATE_URL}/v1`;
const openai = createOpenAI({ baseURL, apiKey });
const report = z.object({ sky: z.enum(["blue", "grey"]), degrees: z.number().int().min(0).max(99) }).strict();
const models = {
  chat: openai.chat(model),
  responses: openai.responses(model),
  anthropic: createAnthropic({ baseURL, apiKey })(model),
};
const seen = {};
for (const [name, one] of Object.entries(models)) {
  const options = {
    model: one, prompt: "What is the weather?", maxOutputTokens: 120, maxRetries: 0, temperature: 0,
    // Random weights would go on calling until the last token.
    providerOptions: { openai: { parallelToolCalls: false }, anthropic: { disableParallelToolUse: true } },
  };
  const called = await generateText({
    ...options,
    tools: { weather: tool({ description: "Tell the weather.", inputSchema: report, strict: true }) },
    toolChoice: "required",
  });
  const call = called.toolCalls[0];
  seen[name] = { tool: call?.toolName, input: report.safeParse(call?.input).success, finish: called.finishReason };
  if (name !== "anthropic") {
    const object = (await generateObject({ ...options, schema: report })).object;
    seen[name].object = report.safeParse(object).success;
  }
}
console.log(JSON.stringify(seen));
