"use strict";
// Stop at a lane, its bars or its row of the table: all that is about it stands
// out, and so do the links that it passes.
(() => {
  const picture = document.querySelector("svg.picture");
  const about = document.querySelectorAll("[data-lane]");
  const links = document.querySelectorAll("[data-lanes]");
  const show = (lane) => {
    picture.classList.toggle("some", lane !== null);
    for (const e of about) e.classList.toggle("on", e.dataset.lane === lane);
    for (const e of links) e.classList.toggle("on", lane !== null && e.dataset.lanes.split(" ").includes(lane));
  };
  for (const e of about) {
    e.addEventListener("pointerenter", () => show(e.dataset.lane));
    e.addEventListener("pointerleave", () => show(null));
  }
})();
