"use strict";
const box = document.getElementById("find");
if (box) {
  const rows = [...document.querySelectorAll("#rows details")];
  const shown = document.getElementById("shown");
  const texts = rows.map((row) => row.textContent.toLowerCase());
  box.addEventListener("input", () => {
    const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    rows.forEach((row, i) => {
      row.hidden = !words.every((word) => texts[i].includes(word));
      if (!row.hidden) count += 1;
    });
    shown.textContent = `${count} of ${rows.length} rows of the sample`;
  });
}
