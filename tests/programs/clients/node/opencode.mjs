// opencode's command line, without a terminal: `opencode run`. All settings are those of docs/agents.md.
import { check, EDIT, edited, ended, expect, main, newHome, paste, text } from "./harness.mjs";

const program = new URL("node_modules/.bin/opencode", import.meta.url).pathname;

async function opencode(prompt, home = newHome("opencode"), more = {}) {
  const env = { ...paste("opencode", home), ...more };
  return await ended(program, ["run", "--format", "json", prompt], { env, cwd: home });
}

check("chat: stream", async () => {
  const { out, error } = await opencode("hello");
  expect(out.includes(text), out + error);
});

check("a file is edited", async () => {
  const home = newHome("opencode");
  await opencode(EDIT, home);
  edited(home);
});

check("error 401", async () => {
  const { out, error } = await opencode("hello", newHome("opencode"), { FIRSTTOKEN_KEY: "sk-wrong" });
  expect(/API key/i.test(out + error), out + error);
});

await main("opencode-ai");
