// The page of a timeline that has ended: what stands around its chart.

document.getElementById("facts").textContent = page.facts.join(", ");
document.getElementById("bottleneck").textContent = page.bottleneck;
page.table.forEach((line, index) => {
  const row = document.getElementById("table").insertRow();
  for (const text of line) row.append(element(index ? "td" : "th", text));
});
readTheme();
add(page.part);
fit();
