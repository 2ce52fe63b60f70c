// The OpenAI SDK for Node.
import OpenAI, { AzureOpenAI } from "openai";
import {
  aborted, apiKey, baseURL, check, cities, city, collect, equal, expect, image, imageSeen, long, main, model,
  reasoning, rejects, rootURL, seen, text, textTokens, turn, weather, weatherSchema,
} from "./harness.mjs";

const client = new OpenAI({ baseURL, apiKey, timeout: 15_000 });
const once = new OpenAI({ baseURL, apiKey, timeout: 15_000, maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
const tool = { type: "function", function: { name: "get_weather", description: "Weather now", parameters: city } };
const flatTool = { type: "function", name: "get_weather", parameters: city, strict: true };
const format = { type: "json_schema", json_schema: { name: "weather", schema: weatherSchema, strict: true } };
const chat = (more) => client.chat.completions.create({ model, messages, ...more });
const respond = (more) => client.responses.create({ model, input: "hello", ...more });

check("chat", async () => {
  const answer = await chat();
  equal([answer.choices[0].message.content, answer.choices[0].finish_reason], [text, "stop"]);
});

check("chat: usage", async () => {
  const { usage } = await chat();
  equal([usage.completion_tokens, usage.prompt_tokens > 0], [textTokens, true]);
});

check("chat: max_tokens", async () => {
  const { choices: [choice], usage } = await chat({ max_tokens: 3 });
  const said = choice.message.content;
  equal([choice.finish_reason, usage.completion_tokens], ["length", 3]);
  expect(text.startsWith(said) && said !== "" && said !== text, choice);
});

check("chat: stream", async () => {
  const chunks = await collect(await chat({ stream: true }));
  equal(chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join(""), text);
  equal(chunks.at(-1).choices[0].finish_reason, "stop");
  equal(chunks.filter((chunk) => chunk.usage), []);
});

check("chat: stream with usage", async () => {
  const chunks = await collect(await chat({ stream: true, stream_options: { include_usage: true } }));
  equal([chunks.at(-1).choices, chunks.at(-1).usage.completion_tokens], [[], textTokens]);
});

check("chat: tools", async () => {
  const asked = [{ role: "user", content: "What is the weather in Oslo?" }];
  const [choice] = (await chat({ messages: asked, tools: [tool] })).choices;
  const [call] = choice.message.tool_calls;
  equal([choice.finish_reason, JSON.parse(call.function.arguments)], ["tool_calls", { city: "Oslo" }]);
  const result = { role: "tool", tool_call_id: call.id, content: "snow" };
  const answer = await chat({ messages: [...asked, choice.message, result], tools: [tool] });
  equal(answer.choices[0].message.content, "The tools say: snow");
});

check("chat: parallel tools, streamed", async () => {
  const request = { model, messages: [{ role: "user", content: cities }], tools: [tool] };
  const final = await client.chat.completions.stream(request).finalChatCompletion();
  const found = final.choices[0].message.tool_calls.map((call) => JSON.parse(call.function.arguments).city);
  equal(found, ["Paris", "Rome"]);
});

check("chat: tool runner", async () => {
  const run = ({ city: name }) => `${name}: snow`;
  const runnable = { type: "function", function: { ...tool.function, function: run, parse: JSON.parse } };
  const runner = client.chat.completions.runTools({ model, messages: [{ role: "user", content: cities }], tools: [runnable] });
  equal(await runner.finalContent(), "The tools say: Paris: snow; Rome: snow");
});

check("chat: structured output", async () => {
  const answer = await client.chat.completions.parse({ model, messages, response_format: format });
  equal(JSON.parse(answer.choices[0].message.content), weather);
});

check("chat: reasoning", async () => {
  const answer = await chat({ reasoning_effort: "high" });
  const { message } = answer.choices[0];
  equal(message.reasoning ?? message.reasoning_content, reasoning);
});

check("chat: images", async () => {
  const picture = { type: "image_url", image_url: { url: `data:image/png;base64,${image}` } };
  const content = [{ type: "text", text: "what is this?" }, picture];
  equal((await chat({ messages: [{ role: "user", content }] })).choices[0].message.content, imageSeen);
});

check("chat: cached tokens", async () => {
  const asked = [{ role: "user", content: `Node. ${long}` }];
  await chat({ messages: asked });
  const { usage } = await chat({ messages: asked });
  expect(usage.prompt_tokens_details?.cached_tokens >= 192, usage);
});

check("chat: abort", async () => {
  const before = (await seen()).aborts;
  const stream = await chat({ messages: [{ role: "user", content: "count to 1000" }], stream: true });
  for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
  await aborted(before);
});

check("chat: response headers", async () => {
  const request = client.chat.completions.create({ model, messages }, { headers: { "x-request-id": "node-1" } });
  const { data, response, request_id } = await request.withResponse();
  equal([request_id, data._request_id], ["node-1", "node-1"]);
  equal(response.headers.get("x-firsttoken-route"), model);
  expect(Number(response.headers.get("x-firsttoken-ttft-ms")) > 0, "no TTFT");
});

check("completions", async () => {
  const answer = await client.completions.create({ model, prompt: "Once upon a time", max_tokens: 8 });
  expect(answer.object === "text_completion" && answer.choices[0].text.length > 0, answer);
});

check("embeddings", async () => {
  const answer = await client.embeddings.create({ model, input: ["a", "b"] });
  equal(answer.data.map((item) => item.embedding.length), [8, 8]);
});

check("models: list", async () => {
  const found = await collect(await client.models.list());
  expect(found.some((entry) => entry.id === model), found);
});

check("models: get", async () => {
  equal((await client.models.retrieve(model)).id, model);
  await rejects(OpenAI.NotFoundError, () => client.models.retrieve("no-such-model"));
});

check("responses", async () => {
  const answer = await respond({ instructions: "Be brief." });
  equal([answer.output_text, answer.status, answer.usage.output_tokens], [text, "completed", textTokens]);
});

check("responses: stream", async () => {
  const events = await collect(await respond({ stream: true }));
  equal(events.map((event) => event.sequence_number), events.map((_, i) => i));
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  equal(deltas.map((event) => event.delta).join(""), text);
  equal(events.at(-1).type, "response.completed");
});

check("responses: stream helper", async () => {
  const final = await client.responses.stream({ model, input: "hello" }).finalResponse();
  equal(final.output_text, text);
});

check("responses: tools", async () => {
  const input = [{ role: "user", content: "What is the weather in Oslo?" }];
  const asked = await respond({ input, tools: [flatTool] });
  const call = asked.output.find((item) => item.type === "function_call");
  equal(JSON.parse(call.arguments), { city: "Oslo" });
  const result = { type: "function_call_output", call_id: call.call_id, output: "snow" };
  equal((await respond({ input: [...input, ...asked.output, result], tools: [flatTool] })).output_text, "The tools say: snow");
});

check("responses: parallel tools, streamed", async () => {
  const events = await collect(await respond({ input: cities, tools: [flatTool], stream: true }));
  const done = events.filter((event) => event.type === "response.function_call_arguments.done");
  equal(done.map((event) => JSON.parse(event.arguments).city), ["Paris", "Rome"]);
});

check("responses: structured output", async () => {
  const answer = await respond({ text: { format: { type: "json_schema", name: "weather", schema: weatherSchema, strict: true } } });
  equal(JSON.parse(answer.output_text), weather);
});

check("responses: reasoning", async () => {
  const answer = await respond({ reasoning: { effort: "high", summary: "auto" } });
  equal([answer.output[0].type, answer.output_text], ["reasoning", text]);
});

check("responses: previous response", async () => {
  const first = await respond({ model: "stateful", input: turn });
  const second = await respond({ model: "stateful", input: turn, previous_response_id: first.id });
  equal(second.output_text, first.output_text.replace("turn 1", "turn 2"));
});

check("azure: chat", async () => {
  const azure = new AzureOpenAI({ endpoint: rootURL, apiKey, apiVersion: "2026-10-01", deployment: model });
  equal((await azure.chat.completions.create({ model, messages })).choices[0].message.content, text);
});

check("error 400", async () => {
  const error = await rejects(OpenAI.BadRequestError, () => client.chat.completions.create({ model }));
  equal([error.type, error.param], ["invalid_request_error", "messages"]);
});

check("error 401", async () => {
  const wrong = new OpenAI({ baseURL, apiKey: "sk-wrong" });
  const error = await rejects(OpenAI.AuthenticationError, () => wrong.chat.completions.create({ model, messages }));
  equal(error.code, "invalid_api_key");
});

check("error 404", async () => {
  const error = await rejects(OpenAI.NotFoundError, () => chat({ model: "no-such-model" }));
  equal([error.code, error.param], ["model_not_found", "model"]);
});

check("error 429", async () => {
  const error = await rejects(OpenAI.RateLimitError, () => once.chat.completions.create({ model: "limited", messages }));
  expect(error.headers.get("retry-after"), "no retry-after");
});

check("error 503", async () => {
  const error = await rejects(OpenAI.InternalServerError, () => once.chat.completions.create({ model: "down", messages }));
  equal(error.status, 503);
});

check("error inside a stream", async () => {
  await rejects(OpenAI.APIError, async () => collect(await chat({ model: "breaks", stream: true })));
});

check("retry after a 429", async () => {
  const started = Date.now();
  const before = (await seen()).requests;
  const answer = await chat({ model: "flaky", messages: [{ role: "user", content: `hello at ${started}` }] });
  equal([answer.choices[0].message.content, (await seen()).requests - before], [text, 2]);
  expect(Date.now() - started >= 1000, "not after the server's retry-after");
});

await main("openai");
