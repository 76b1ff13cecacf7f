"use strict";
const box = document.getElementById("find");
if (box) {
  const rows = [...document.querySelectorAll("#rows details")];
  const shown = document.getElementById("shown");
  const plain = (text) => text.toLowerCase().replace(/\s+/g, " ");
  const texts = rows.map((row) =>
    [...row.querySelectorAll("summary b, pre")].map((part) => plain(part.textContent)),
  );
  box.addEventListener("input", () => {
    const phrase = plain(box.value.trim());
    let count = 0;
    rows.forEach((row, i) => {
      row.hidden = !texts[i].some((text) => text.includes(phrase));
      if (!row.hidden) count += 1;
    });
    shown.textContent = `${count} of ${rows.length} rows of the sample`;
  });
}
