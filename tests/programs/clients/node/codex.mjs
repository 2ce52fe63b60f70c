// Codex's command line, without a terminal: `codex exec`.
// All settings are those of docs/agents.md, but for the check that names others.
import { readFileSync, writeFileSync } from "node:fs";
import { apiKey, baseURL, check, EDIT, edited, ended, equal, expect, main, newHome, paste, text, textTokens } from "./harness.mjs";

const program = new URL("node_modules/.bin/codex", import.meta.url).pathname;
const config = (home) => `${home}/.codex/config.toml`;

function pasted() {
  const home = newHome("codex");
  return { home, env: paste("codex", home) };
}

// The events of a turn; `said`: messages of the agent.
async function exec(prompt, { home, env } = pasted(), more = []) {
  const args = ["exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ...more, prompt];
  const { out, error } = await ended(program, args, { env, cwd: home });
  const events = out.split("\n").filter((line) => line.startsWith("{")).map((line) => JSON.parse(line));
  const items = events.filter((event) => event.type === "item.completed").map((event) => event.item);
  const said = items.filter((item) => item.type === "agent_message").map((item) => item.text);
  const failed = events.filter((event) => event.type === "turn.failed").map((event) => event.error.message);
  return { events, items, said, failed: failed.join(), error };
}

check("responses: stream", async () => {
  const { said, failed, error } = await exec("hello");
  equal([said, failed], [[text], ""]);
  expect(!error.includes("WebSocket"), error);
});

check("responses: usage", async () => {
  const { events, failed } = await exec("hello");
  const { usage } = events.find((event) => event.type === "turn.completed") ?? { usage: failed };
  expect(usage.input_tokens > 100 && usage.output_tokens === textTokens, usage);
});

check("responses: a command and its result", async () => {
  const { items, said, failed } = await exec("run this command: `echo from-codex`");
  const command = items.find((item) => item.type === "command_execution");
  expect(command?.aggregated_output?.includes("from-codex"), failed || items);
  expect(said.at(-1).startsWith("The tools say:") && said.at(-1).includes("from-codex"), said);
});

check("responses: cached tokens", async () => {
  const user = pasted();
  await exec("hello", user);
  const { events, failed } = await exec("hello", user);
  const { usage } = events.find((event) => event.type === "turn.completed") ?? { usage: failed };
  expect(usage.cached_input_tokens > 100, usage);
});

check("a file is edited", async () => {
  const user = pasted();
  const { failed } = await exec(EDIT, user);
  equal(failed, "");
  edited(user.home);
});

// Codex cuts the output of a command to 10,000 tokens: the fourth does not fit into 32,768.
check("a conversation beyond the context window is compacted", async () => {
  const user = pasted();
  const wide = "run this command: `seq 1 20000`";
  equal((await exec(wide, user)).failed, "");
  for (const prompt of [wide, wide, wide, "hello"]) equal((await exec(prompt, user, ["resume", "--last"])).failed, "");
});

check("WebSocket", async () => {
  const user = pasted();
  writeFileSync(config(user.home), `model = "agent"\nopenai_base_url = "${baseURL}"\n`);
  await ended(program, ["login", "--with-api-key"], { env: user.env, cwd: user.home, input: apiKey });
  const started = Date.now();
  const { said, failed } = await exec("hello", user);
  equal([said, failed], [[text], ""]);
  expect(Date.now() - started < 4000, `${(Date.now() - started) / 1000} s`);
});

check("error 401", async () => {
  const { home, env } = pasted();
  const { failed } = await exec("hello", { home, env: { ...env, FIRSTTOKEN_KEY: "sk-wrong" } });
  expect(failed.includes("401"), failed);
});

check("error 404", async () => {
  const user = pasted();
  const written = readFileSync(config(user.home), "utf8").replace('model = "agent"', 'model = "no-such-model"');
  writeFileSync(config(user.home), `${written}request_max_retries = 0\nstream_max_retries = 0\n`);
  const { failed } = await exec("hello", user);
  expect(failed.includes("no-such-model"), failed);
});

await main("@openai/codex");
