// Endpoints: load, beliefs, and what limits each engine; and which engine holds which of the hottest prefixes.

const meter = (value, kind = "") => {
  const bar = svg(
    "svg", { class: "meter", viewBox: "0 0 64 8", role: "img", "aria-label": share(value) },
    svg("rect", { class: "track", width: 64, height: 8, rx: 2 }),
    svg("rect", { class: "fill", width: Math.min(value, 1) * 64, height: 8, rx: 2 }),
  );
  return el("td", { class: kind }, bar, `${(value * 100).toFixed(0)}%`);
};

const beliefText = (found) => {
  const lasts = found.for_s === null ? "" : `, for ${found.for_s.toFixed(0)} s`;
  const whom = found.callers === "all" ? "all callers" : `${found.callers} of the callers`;
  return `${found.what}${lasts}, to ${whom}: ${found.why}`;
};
const holdText = (held) =>
  `${held.requests} held by ${held.rule}, for up to ${held.longest_s.toFixed(1)} s; freed by ${held.freed_by}`;
const holdRow = (held) => el("tr", {}, el("td", { class: "why", colspan: 8 }, holdText(held)));
const beliefRow = (found) => el("tr", {}, el("td", { class: "why", colspan: 8 }, beliefText(found)));

const endpointRows = (entry) => {
  const { load, calibration } = entry;
  const [low, middle, high] = entry.error.map((ratio) => ratio.toFixed(2));
  const again = entry.tried_again_in_s ? `, again in ${entry.tried_again_in_s.toFixed(0)} s` : "";
  const dissent = Object.entries(entry.health_by_worker ?? {}).filter(([, health]) => health !== load.health);
  const otherwise = dissent.length ? ` (not to worker ${dissent.map(([worker]) => worker).join(", ")})` : "";
  const within = calibration ? share(calibration.under_p90) : "–";
  const behind = `${entry.samples} first tokens seen, ${within} of them within the predicted p90 (90% is perfect); ` +
    `${entry.prefix_blocks} of ${entry.prefix_capacity} prefix blocks believed`;
  const row = el(
    "tr", { class: entry.believed.length ? "told" : null },
    cell(entry.endpoint.id, "mono"), cell(`${load.health}${again}${otherwise}`, `state ${load.health}`),
    cell(`${load.in_flight}`), cell(load.ahead.toFixed(0), "n big"), cell(`${load.running}, ${load.waiting}`, "n big"),
    entry.scraped_s_ago === null ? cell("–", "soft big") : meter(load.kv_usage, "big"),
    cell(entry.samples ? `${middle} (${low} to ${high})` : "–", "n big", behind),
    cell(entry.bound ?? "–", entry.bound === "none" || entry.bound === "idle" ? "soft" : "", entry.pool_bound ? `pool: ${entry.pool_bound}` : null),
  );
  return [row, ...entry.believed.map(beliefRow), ...entry.held.map(holdRow)];
};

const showFleet = (fleet) => replaceRows(byId("fleet").tBodies[0], fleet.flatMap(endpointRows));

// A column for each endpoint that holds any of them; a cell has the held share.
const showPrefixes = (prefixes) => {
  const holders = [...new Set(prefixes.flatMap((each) => Object.keys(each.held)))].sort();
  const names = [["prefix", ""], ["pool", ""], ["tokens", "n"], ...holders.map((name) => [name, "n mono"])];
  byId("prefixes").tHead.replaceChildren(el("tr", {}, ...names.map(([name, kind]) => el("th", { scope: "col", class: kind }, name))));
  const rows = prefixes.map((each) => el(
    "tr", {}, cell(each.prefix, "mono"), cell(each.pool, ""), cell(`${each.tokens}`),
    ...holders.map((name) => (each.held[name] ? meter(each.held[name] / each.tokens) : cell("–", "n soft"))),
  ));
  replaceRows(byId("prefixes").tBodies[0], rows.length ? rows : [nothing(3, "no pool with several engines has computed a prompt twice lately")]);
};

