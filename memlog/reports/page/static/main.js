"use strict";
/* Turns the page's drawings into live ones. Without this script, the page is complete but static. */
(() => {
  const { data } = memlog;
  for (const details of document.querySelectorAll("details.as-table")) details.open = false;
  if (window.uPlot && data.charts.length) memlog.charts(document.getElementById("charts"));
  const icicle = document.getElementById("icicle");
  if (icicle && data.tree) memlog.icicle(icicle, data.tree);
})();
