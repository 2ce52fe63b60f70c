// The Anthropic SDK for Node.
import Anthropic from "@anthropic-ai/sdk";
import {
  aborted, apiKey, check, cities, city, collect, equal, expect, image, imageSeen, long, main, model, reasoning,
  rejects, rootURL, seen, text, textTokens, weather, weatherSchema,
} from "./harness.mjs";

const client = new Anthropic({ baseURL: rootURL, apiKey, timeout: 15_000 });
const once = new Anthropic({ baseURL: rootURL, apiKey, timeout: 15_000, maxRetries: 0 });
const messages = [{ role: "user", content: "hello" }];
const tool = { name: "get_weather", description: "Weather now", input_schema: city };
const request = (more) => ({ model, max_tokens: 500, messages, ...more });
const create = (more) => client.messages.create(request(more));

check("messages", async () => {
  const answer = await create({ system: "Be brief." });
  equal([answer.content[0].text, answer.stop_reason], [text, "end_turn"]);
  expect(answer._request_id, "no request id");
});

check("messages: usage", async () => {
  const { usage } = await create();
  equal([usage.output_tokens, usage.input_tokens > 0], [textTokens, true]);
});

check("messages: max_tokens", async () => {
  const answer = await create({ max_tokens: 3 });
  const [{ text: said }] = answer.content;
  equal([answer.stop_reason, answer.usage.output_tokens], ["max_tokens", 3]);
  expect(text.startsWith(said) && said !== "" && said !== text, answer);
});

check("messages: stream", async () => {
  const events = await collect(await create({ stream: true }));
  const names = events.map((event) => event.type).filter((name) => name !== "ping" && name !== "content_block_delta");
  equal(names, ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]);
  equal(events.map((event) => event.delta?.text ?? "").join(""), text);
});

check("messages: stream helper", async () => {
  const final = await client.messages.stream(request()).finalMessage();
  equal([final.content[0].text, final.usage.output_tokens], [text, textTokens]);
});

check("messages: tools", async () => {
  const asked = [{ role: "user", content: "What is the weather in Oslo?" }];
  const answer = await create({ messages: asked, tools: [tool] });
  const call = answer.content.find((block) => block.type === "tool_use");
  equal([answer.stop_reason, call.input], ["tool_use", { city: "Oslo" }]);
  const content = [{ type: "tool_result", tool_use_id: call.id, content: "snow" }];
  const next = [...asked, { role: "assistant", content: answer.content }, { role: "user", content }];
  equal((await create({ messages: next, tools: [tool] })).content[0].text, "The tools say: snow");
});

check("messages: parallel tools, streamed", async () => {
  const stream = client.messages.stream(request({ messages: [{ role: "user", content: cities }], tools: [tool] }));
  const calls = (await stream.finalMessage()).content.filter((block) => block.type === "tool_use");
  equal(calls.map((call) => call.input.city), ["Paris", "Rome"]);
});

check("messages: structured output", async () => {
  const answer = await create({ output_config: { format: { type: "json_schema", schema: weatherSchema } } });
  equal(JSON.parse(answer.content[0].text), weather);
});

check("messages: thinking, streamed", async () => {
  const thinking = { type: "enabled", budget_tokens: 2000 };
  const final = await client.messages.stream(request({ max_tokens: 4000, thinking })).finalMessage();
  equal(final.content.map((block) => block.type), ["thinking", "text"]);
  equal(final.content[0].thinking.trim(), reasoning);
});

check("messages: images", async () => {
  const picture = { type: "image", source: { type: "base64", media_type: "image/png", data: image } };
  const content = [picture, { type: "text", text: "what is this?" }];
  equal((await create({ messages: [{ role: "user", content }] })).content[0].text, imageSeen);
});

check("messages: cached tokens", async () => {
  const asked = [{ role: "user", content: `Anthropic, Node. ${long}` }];
  await create({ messages: asked });
  const { usage } = await create({ messages: asked });
  expect(usage.cache_read_input_tokens >= 192 && usage.input_tokens < 50, usage);
});

check("messages: abort", async () => {
  const before = (await seen()).aborts;
  const stream = await create({ messages: [{ role: "user", content: "count to 1000" }], stream: true });
  for await (const event of stream) if (event.type === "content_block_delta") break;
  await aborted(before);
});

check("count_tokens", async () => {
  const { input_tokens: short } = await client.messages.countTokens({ model, messages });
  const { input_tokens: more } = await client.messages.countTokens({ model, messages: [{ role: "user", content: long }] });
  expect(short > 0 && short < 40 && more >= 150 && more <= 1000, [short, more]); // by the engine's own words
});

check("models: list", async () => {
  const found = await collect(client.models.list());
  expect(found.some((entry) => entry.id === model), found);
});

check("models: get", async () => {
  equal((await client.models.retrieve(model)).id, model);
});

check("error 400", async () => {
  const error = await rejects(Anthropic.BadRequestError, () => create({ messages: [] }));
  equal(error.error.error.type, "invalid_request_error");
});

check("error 401", async () => {
  const wrong = new Anthropic({ baseURL: rootURL, apiKey: "sk-wrong" });
  const error = await rejects(Anthropic.AuthenticationError, () => wrong.messages.create(request()));
  equal(error.error.error.type, "authentication_error");
});

check("error 404", async () => {
  const error = await rejects(Anthropic.NotFoundError, () => create({ model: "no-such-model" }));
  equal(error.error.error.type, "not_found_error");
});

check("error 429", async () => {
  const error = await rejects(Anthropic.RateLimitError, () => once.messages.create(request({ model: "limited" })));
  equal(error.error.error.type, "rate_limit_error");
  expect(error.headers.get("retry-after"), "no retry-after");
});

check("error 503", async () => {
  const error = await rejects(Anthropic.InternalServerError, () => once.messages.create(request({ model: "down" })));
  expect([503, 529].includes(error.status), error.status);
});

check("error inside a stream", async () => {
  await rejects(Anthropic.APIError, async () => collect(await create({ model: "breaks", stream: true })));
});

check("retry after a 429", async () => {
  const started = Date.now();
  const before = (await seen()).requests;
  const answer = await create({ model: "flaky", messages: [{ role: "user", content: `hello at ${started}` }] });
  equal([answer.content[0].text, (await seen()).requests - before], [text, 2]);
  expect(Date.now() - started >= 1000, "not after the server's retry-after");
});

await main("@anthropic-ai/sdk");
