// Incidents: what failed or was late, by route and culprit, failures first; a row leads to its latest request.

const SHOWN_INCIDENTS = 8;
const MINUTES = { now: 5, "5m": 5, "1h": 60 };
const INCIDENT_COLUMNS = 7;

const incidentRow = (found, now) => {
  const link = el("a", { href: address({ request: found.request_id }), "data-focus": `incident ${found.route} ${found.culprit}` }, found.headline);
  return el(
    "tr", {}, el("td", { class: found.failed ? "name bad" : "name" }, link), cell(found.route, "name"), cell(found.cause, ""),
    cell(found.failed && !found.late ? "–" : ms(found.over_ms), "n"), cell(`${age(now - found.since)} ago`, "n soft"),
    cell(`${age(now - found.last)} ago`, "n soft"), el("td", { class: "words" }, `${found.evidence}. `, el("em", {}, found.mend)),
  );
};

const showIncidents = ({ incidents }, now) => {
  const rows = incidents.slice(0, SHOWN_INCIDENTS).map((found) => incidentRow(found, now));
  replaceRows(byId("incidents").tBodies[0], rows.length ? rows : [nothing(INCIDENT_COLUMNS, "none: every request met its budgets")]);
  byId("incidents-note").textContent = `last ${MINUTES[viewed().window]} min, failures first${incidents.length > SHOWN_INCIDENTS ? `; the worst ${SHOWN_INCIDENTS}` : ""}`;
};
