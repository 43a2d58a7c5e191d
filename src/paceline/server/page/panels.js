// The panels at both sides. They are next to the conversation if there is room, and cover it if there is none.

/** `wide`: a media query for windows with room for the panel. There, the panel is open from the start. */
export class Panel {
  constructor(panel, button, wide) {
    this.panel = panel;
    this.button = button;
    this.wide = matchMedia(wide);
    this.toggle(this.wide.matches);
    this.wide.addEventListener("change", () => this.toggle(this.wide.matches));
    button.addEventListener("click", () => {
      this.toggle(panel.hidden);
      if (!panel.hidden) panel.querySelector("button, select, input, textarea").focus();
    });
    panel.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.defaultPrevented) return;
      this.toggle(false);
      button.focus();
    });
    // If the panel covers the page, it must not cover the element with the focus.
    panel.addEventListener("focusout", ({ relatedTarget: next }) => {
      if (next && next !== button && !panel.contains(next)) this.leave();
    });
    document.querySelector("main").addEventListener("pointerdown", () => this.leave());
  }

  toggle(open) {
    this.panel.hidden = !open;
    this.button.setAttribute("aria-expanded", open);
  }

  /** Closes the panel if it covers the page. */
  leave() {
    if (!this.wide.matches) this.toggle(false);
  }
}
