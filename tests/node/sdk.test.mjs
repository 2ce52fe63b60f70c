// The official OpenAI SDK for Node against a running gateway: BASE_URL is its /v1, MODEL a route.
import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const baseURL = process.env.BASE_URL;
const model = process.env.MODEL ?? "chat";
assert.ok(baseURL, "set BASE_URL to the gateway's /v1");

const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 20_000 });
const messages = [{ role: "user", content: "Say something about latency." }];

async function collect(stream) {
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  return chunks;
}

test("a chat completion is a message with usage", async () => {
  const answer = await client.chat.completions.create({ model, messages, max_tokens: 16 });
  assert.equal(answer.object, "chat.completion");
  assert.equal(answer.choices[0].message.role, "assistant");
  assert.ok(answer.choices[0].message.content.length > 0);
  assert.ok(answer.usage.prompt_tokens > 0);
  assert.ok(answer.usage.completion_tokens > 0 && answer.usage.completion_tokens <= 16);
});

test("a stream yields content, ends with a finish reason, and has no unrequested usage", async () => {
  const chunks = await collect(await client.chat.completions.create({ model, messages, max_tokens: 16, stream: true }));
  const text = chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join("");
  assert.ok(text.length > 0);
  assert.ok(chunks.some((chunk) => chunk.choices[0].finish_reason !== null));
  assert.deepEqual(chunks.filter((chunk) => chunk.usage), []);
});

test("a stream with include_usage ends with one usage chunk without choices", async () => {
  const request = { model, messages, max_tokens: 8, stream: true, stream_options: { include_usage: true } };
  const chunks = await collect(await client.chat.completions.create(request));
  const last = chunks.at(-1);
  assert.deepEqual(last.choices, []);
  assert.ok(last.usage.prompt_tokens > 0);
  assert.ok(last.usage.completion_tokens > 0 && last.usage.completion_tokens <= 8);
  assert.equal(chunks.filter((chunk) => chunk.usage).length, 1);
});

test("tools reach the engine and make the prompt longer", async () => {
  const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
  const weather = { name: "weather", description: "The weather of a city, now and in the next days.", parameters };
  const plain = await client.chat.completions.create({ model, messages, max_tokens: 4 });
  const tools = [{ type: "function", function: weather }];
  const tooled = await client.chat.completions.create({ model, messages, tools, max_tokens: 4 });
  assert.ok(tooled.usage.prompt_tokens > plain.usage.prompt_tokens);
});

test("a legacy completion is a text", async () => {
  const answer = await client.completions.create({ model, prompt: "Once upon a time", max_tokens: 8 });
  assert.equal(answer.object, "text_completion");
  assert.ok(answer.choices[0].text.length > 0);
});

test("a stream can be aborted, and the next request is served", async () => {
  const stream = await client.chat.completions.create({ model, messages, max_tokens: 200, stream: true });
  for await (const _ of stream) break;
  const answer = await client.chat.completions.create({ model, messages, max_tokens: 4 });
  assert.ok(answer.choices[0].message.content.length > 0);
});

test("the models are the routes", async () => {
  const models = await collect(await client.models.list());
  assert.ok(models.map((entry) => entry.id).includes(model));
});

test("an unknown model is a NotFoundError with the code model_not_found", async () => {
  await assert.rejects(client.chat.completions.create({ model: "no-such-model", messages }), (error) => {
    assert.ok(error instanceof OpenAI.NotFoundError);
    assert.equal(error.code, "model_not_found");
    assert.equal(error.param, "model");
    return true;
  });
});

test("a request without messages is a BadRequestError that names the field", async () => {
  await assert.rejects(client.chat.completions.create({ model }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.type, "invalid_request_error");
    assert.equal(error.param, "messages");
    return true;
  });
});

test("response headers name the request, the route and the model", async () => {
  const request = client.chat.completions.create({ model, messages, max_tokens: 4 }, { headers: { "x-request-id": "node-1" } });
  const { data, response, request_id } = await request.withResponse();
  assert.equal(request_id, "node-1");
  assert.equal(data._request_id, "node-1");
  assert.equal(response.headers.get("x-firsttoken-route"), model);
  assert.ok(response.headers.get("x-firsttoken-model"));
  assert.ok(Number(response.headers.get("x-firsttoken-ttft-ms")) > 0);
});
