// Continue's command line, without a terminal: `cn -p`. All settings are those of docs/agents.md.
import { check, EDIT, edited, ended, expect, main, newHome, paste, text } from "./harness.mjs";

const program = new URL("node_modules/.bin/cn", import.meta.url).pathname;

async function cn(prompt, home = newHome("continue")) {
  const env = paste("continue", home);
  const args = ["--config", `${home}/.continue/config.yaml`, "--auto", "-p", prompt];
  return await ended(program, args, { env, cwd: home });
}

check("chat: stream", async () => {
  const { out, error } = await cn("hello");
  expect(out.includes(text), out + error);
});

check("a file is edited", async () => {
  const home = newHome("continue");
  const { out, error } = await cn(EDIT, home);
  expect(out.includes("The tools say:"), out + error);
  edited(home);
});

await main("@continuedev/cli");
