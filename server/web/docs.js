"use strict";
// The page of /openapi.json: every route, and every field with what it accepts.

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function range(schema) {
  const least = schema.minimum ?? schema.minLength ?? schema.minItems;
  const most = schema.maximum ?? schema.maxLength ?? schema.maxItems;
  if (least === undefined && most === undefined) return "";
  return ` (${least ?? "…"} to ${most ?? "…"})`;
}

function accepts(schema) {
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.anyOf) return [...new Set(schema.anyOf.map(accepts))].join(" or ");
  if (schema.type === "array") return `list of ${accepts(schema.items ?? {})}${range(schema)}`;
  if (schema.type === undefined) return "any value";
  return `${[].concat(schema.type).join(" or ")}${range(schema)}`;
}

function rows(schema, lead) {
  const found = [];
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const isRequired = (schema.required ?? []).includes(name);
    found.push([
      lead + name,
      accepts(field),
      isRequired ? "required" : field.default === undefined ? "" : JSON.stringify(field.default),
      field.description ?? "",
    ]);
    const inner = (field.anyOf ?? [field]).find((one) => one.properties);
    if (inner) found.push(...rows(inner, `${lead}${name}.`));
  }
  return found;
}

function table(found) {
  const made = element("table");
  const head = element("tr");
  for (const title of ["field", "accepts", "default", "meaning"]) head.append(element("th", "", title));
  made.append(head);
  for (const cells of found) {
    const row = element("tr");
    cells.forEach((cell, index) => {
      const data = element("td");
      data.append(index === 3 ? cell : element("code", "", cell));
      row.append(data);
    });
    made.append(row);
  }
  return made;
}

function describe(document_, path, method, operation) {
  const article = element("article");
  const details = element("details");
  const summary = element("summary");
  summary.append(element("span", "method", method.toUpperCase()), element("code", "", path));
  summary.append(` ${operation.summary}`);
  details.append(summary);
  if (operation.description) details.append(element("p", "", operation.description));
  const reference = operation.requestBody?.content["application/json"].schema.$ref;
  if (reference) {
    const schema = document_.components.schemas[reference.split("/").pop()];
    details.append(table(rows(schema, "")));
  }
  article.append(details);
  article.dataset.text = article.textContent.toLowerCase();
  return article;
}

async function main() {
  const document_ = await (await fetch("/openapi.json")).json();
  document.getElementById("version").textContent = document_.info.version;
  const routes = document.getElementById("routes");
  for (const [path, operations] of Object.entries(document_.paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      routes.append(describe(document_, path, method, operation));
    }
  }
  document.getElementById("search").addEventListener("input", (event) => {
    const wanted = event.target.value.toLowerCase();
    for (const article of routes.children) article.hidden = !article.dataset.text.includes(wanted);
  });
}

main();
