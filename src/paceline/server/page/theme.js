// A classic script in the head: it runs before the first paint, so that the other theme does not flash.
(() => {
  try {
    const theme = localStorage.getItem("theme");
    if (theme) document.documentElement.dataset.theme = theme;
  } catch {
    // Storage is not allowed: use the system's theme.
  }
})();
