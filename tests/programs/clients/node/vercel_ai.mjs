// Vercel's AI SDK through three providers: OpenAI (Responses, its default, and chat), OpenAI-compatible, Anthropic.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import {
  aborted, apiKey, baseURL, check, cities, equal, expect, image, imageSeen, long, main, model, reasoning, rejects,
  seen, text, textTokens, weather,
} from "./harness.mjs";

const openai = createOpenAI({ baseURL, apiKey });
const compatible = createOpenAICompatible({ name: "gateway", baseURL, apiKey });
const anthropic = createAnthropic({ baseURL, apiKey });
const schema = z.object({ city: z.string(), temperature: z.number().int(), sunny: z.boolean() });
const tools = {
  get_weather: tool({
    description: "Weather now",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => `${city}: snow`,
  }),
};

// Reasoning: what a user sets for each provider.
const providers = {
  responses: [openai(model), { openai: { reasoningEffort: "high", reasoningSummary: "auto", forceReasoning: true } }],
  chat: [openai.chat(model), null],
  compatible: [compatible(model), { gateway: { reasoningEffort: "high" } }],
  messages: [anthropic(model), { anthropic: { thinking: { type: "enabled", budgetTokens: 2000 } } }],
};

for (const [name, [one, thinking]] of Object.entries(providers)) {
  check(name, async () => {
    const answer = await generateText({ model: one, prompt: "hello", system: "Be brief." });
    equal([answer.text, answer.finishReason, answer.usage.outputTokens], [text, "stop", textTokens]);
  });

  check(`${name}: stream`, async () => {
    const pieces = [];
    const result = streamText({ model: one, prompt: "hello" });
    for await (const piece of result.textStream) pieces.push(piece);
    expect(pieces.join("") === text && pieces.length > 3, pieces);
    equal(await result.finishReason, "stop");
  });

  check(`${name}: tools`, async () => {
    const answer = await generateText({ model: one, prompt: cities, tools, stopWhen: stepCountIs(4) });
    equal([answer.text, answer.steps.length], ["The tools say: Paris: snow; Rome: snow", 2]);
  });

  check(`${name}: tools, streamed`, async () => {
    const result = streamText({ model: one, prompt: cities, tools, stopWhen: stepCountIs(4) });
    equal(await result.text, "The tools say: Paris: snow; Rome: snow");
  });

  check(`${name}: structured output`, async () => {
    const answer = await generateText({ model: one, prompt: "hello", output: Output.object({ schema }) });
    equal(answer.output, weather);
  });

  check(`${name}: images`, async () => {
    const content = [{ type: "text", text: "what is this?" }, { type: "file", data: image, mediaType: "image/png" }];
    const answer = await generateText({ model: one, messages: [{ role: "user", content }] });
    equal(answer.text, imageSeen);
  });

  check(`${name}: cached tokens`, async () => {
    const prompt = `Vercel, ${name}. ${long}`;
    await generateText({ model: one, prompt });
    const { usage } = await generateText({ model: one, prompt });
    expect(usage.inputTokenDetails.cacheReadTokens >= 192, usage);
  });

  check(`${name}: abort`, async () => {
    const before = (await seen()).aborts;
    const controller = new AbortController();
    const result = streamText({ model: one, prompt: "count to 1000", abortSignal: controller.signal });
    for await (const _ of result.textStream) controller.abort();
    await aborted(before);
  });

  if (thinking !== null) {
    check(`${name}: reasoning`, async () => {
      const answer = await generateText({ model: one, prompt: "hello", maxOutputTokens: 4000, providerOptions: thinking });
      equal([answer.text, answer.reasoningText?.trim()], [text, reasoning]);
    });
  }
}

check("embeddings", async () => {
  const { embeddings } = await embedMany({ model: openai.embeddingModel(model), values: ["a", "b"] });
  equal(embeddings.map((vector) => vector.length), [8, 8]);
});

for (const [status, name] of [[404, "no-such-model"], [429, "limited"], [503, "down"]]) {
  check(`error ${status}`, async () => {
    for (const one of [openai(name), openai.chat(name), compatible(name), anthropic(name)]) {
      await new Promise((resolve) => setTimeout(resolve, status === 429 ? 1200 : 0)); // the engine's retry-after
      const error = await rejects(APICallError, () => generateText({ model: one, prompt: "hello", maxRetries: 0 }));
      expect(error.statusCode === status || (one.provider.startsWith("anthropic") && error.statusCode === 529), error.statusCode);
    }
  });
}

check("error 401", async () => {
  const wrong = createOpenAI({ baseURL, apiKey: "sk-wrong" });
  const error = await rejects(APICallError, () => generateText({ model: wrong.chat(model), prompt: "hello" }));
  equal([error.statusCode, error.isRetryable], [401, false]);
});

check("retry after a 429", async () => {
  const started = Date.now();
  const answer = await generateText({ model: openai.chat("flaky"), prompt: `hello at ${started}` });
  equal(answer.text, text);
  expect(Date.now() - started >= 1000, "not after the server's retry-after");
});

await main("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic");
