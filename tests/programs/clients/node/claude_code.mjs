// Claude Code's command line, without a terminal: `claude -p`.
import { spawn } from "node:child_process";
import { apiKey, check, equal, expect, main, model, rootURL, text } from "./harness.mjs";

const program = new URL("node_modules/.bin/claude", import.meta.url).pathname;

// The lines of JSON that it prints.
function claude(prompt, args = [], more = {}) {
  return new Promise((resolve, reject) => {
    const env = { ...process.env, ANTHROPIC_BASE_URL: rootURL, ANTHROPIC_API_KEY: apiKey, ANTHROPIC_MODEL: model, ...more };
    const child = spawn(program, ["-p", prompt, ...args], { env, cwd: process.env.HOME, stdio: ["ignore", "pipe", "pipe"] });
    let out = "";
    child.stdout.on("data", (data) => (out += data));
    child.on("close", () => {
      const lines = out.split("\n").filter((line) => line.startsWith("{"));
      if (lines.length === 0) reject(new Error(`no result: ${out.slice(0, 300)}`));
      resolve(lines.map((line) => JSON.parse(line)));
    });
  });
}

const JSON_RESULT = ["--output-format", "json"];

check("messages: stream", async () => {
  const [answer] = await claude("hello", JSON_RESULT);
  equal([answer.result, answer.is_error, answer.num_turns], [text, false, 1]);
});

check("messages: usage", async () => {
  const [{ usage, result }] = await claude("hello", JSON_RESULT);
  const input = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens;
  expect(input > 100 && usage.output_tokens > 0, { usage, result });
});

check("messages: deltas", async () => {
  const lines = await claude("hello", ["--output-format", "stream-json", "--verbose", "--include-partial-messages"]);
  const deltas = lines.filter((line) => line.type === "stream_event").map((line) => line.event.delta?.text ?? "");
  equal(deltas.join(""), text);
});

check("messages: a command and its result", async () => {
  const [answer] = await claude("run this command: `echo from-claude`", [...JSON_RESULT, "--allowedTools", "Bash(echo:*)"]);
  expect(answer.result.startsWith("The tools say:") && answer.result.includes("from-claude"), answer.result);
  equal(answer.num_turns, 2);
});

check("messages: cached tokens", async () => {
  await claude("hello", JSON_RESULT);
  const [{ usage, result }] = await claude("hello", JSON_RESULT);
  expect(usage.cache_read_input_tokens > 100, { usage, result });
});

check("messages: turns", async () => {
  const [first] = await claude("hello", JSON_RESULT);
  const [second] = await claude("and now?", [...JSON_RESULT, "--resume", first.session_id]);
  equal([second.result, second.is_error], [text, false]);
});

check("bearer key", async () => {
  const [answer] = await claude("hello", JSON_RESULT, { ANTHROPIC_API_KEY: "", ANTHROPIC_AUTH_TOKEN: apiKey });
  equal(answer.result, text);
});

check("error 401", async () => {
  const [answer] = await claude("hello", JSON_RESULT, { ANTHROPIC_API_KEY: "sk-wrong" });
  equal([answer.is_error, answer.api_error_status], [true, 401]);
});

check("error 404", async () => {
  const [answer] = await claude("hello", JSON_RESULT, { ANTHROPIC_MODEL: "no-such-model" });
  equal([answer.is_error, answer.api_error_status], [true, 404]);
  expect(answer.result.includes("no-such-model"), answer.result);
});

await main("@anthropic-ai/claude-code");
