// A classic script in the head: it runs before the first paint, so that a chosen theme does not flash the other one.
(() => {
  try {
    const theme = localStorage.getItem("theme");
    if (theme) document.documentElement.dataset.theme = theme;
  } catch {
    // Storage is forbidden here: the system's theme is used.
  }
})();
