// Claude Code's command line, without a terminal: `claude -p`.
// All settings are those of docs/agents.md.
import { apiKey, check, EDIT, edited, ended, equal, expect, main, newHome, paste, text } from "./harness.mjs";

const program = new URL("node_modules/.bin/claude", import.meta.url).pathname;

// The lines of JSON that it prints.
async function claude(prompt, args = [], more = {}, cwd = process.env.HOME) {
  const env = { ...paste("claude-code", process.env.HOME), ...more };
  const { out, error } = await ended(program, ["-p", prompt, ...args], { env, cwd });
  const lines = out.split("\n").filter((line) => line.startsWith("{"));
  expect(lines.length > 0, `no result: ${out.slice(0, 300)}${error.slice(0, 300)}`);
  return lines.map((line) => JSON.parse(line));
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

check("a file is edited", async () => {
  const home = newHome("claude");
  const [answer] = await claude(EDIT, [...JSON_RESULT, "--allowedTools", "Bash(sed:*)"], {}, home);
  equal(answer.is_error, false);
  edited(home);
});

// The answers to two prompts after two outputs that do not fit beside each other. Fails where nothing was compacted.
async function compacted(more) {
  const wide = "run this command: `seq 1 5400`"; // 14,000 tokens, beside a prompt of 11,000
  const shell = ["--output-format", "stream-json", "--verbose", "--allowedTools", "Bash(seq:*)"];
  const [begun] = await claude(wide, shell, more);
  const answers = [];
  let compactions = 0;
  for (const prompt of [wide, "hello"]) {
    const lines = await claude(prompt, [...shell, "--resume", begun.session_id], more);
    compactions += lines.filter((line) => line.subtype === "compact_boundary").length;
    answers.push(lines.at(-1).result);
  }
  expect(compactions > 0, answers);
  return answers;
}

check("a full context window is compacted", async () => {
  const answers = await compacted();
  equal(answers[1], text);
});

check("a refused prompt is compacted", async () => {
  const answers = await compacted({ CLAUDE_CODE_MAX_CONTEXT_TOKENS: undefined });
  equal(answers[1], text);
});

check("x-api-key", async () => {
  const [answer] = await claude("hello", JSON_RESULT, { ANTHROPIC_API_KEY: apiKey, ANTHROPIC_AUTH_TOKEN: "" });
  equal(answer.result, text);
});

check("error 401", async () => {
  const [answer] = await claude("hello", JSON_RESULT, { ANTHROPIC_AUTH_TOKEN: "sk-wrong" });
  equal([answer.is_error, answer.api_error_status], [true, 401]);
});

check("error 404", async () => {
  const [answer] = await claude("hello", JSON_RESULT, { ANTHROPIC_MODEL: "no-such-model" });
  equal([answer.is_error, answer.api_error_status], [true, 404]);
  expect(answer.result.includes("no-such-model"), answer.result);
});

await main("@anthropic-ai/claude-code");
