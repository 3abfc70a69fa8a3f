// Translate wheel, drag, pinch and click over the picture into pan, zoom and click.
//
// A drag without movement is a click. Two fingers zoom and pan at the same time. A wheel zooms; a
// sideways wheel (or one with shift) pans, and so does a trackpad. A vertical movement of a finger
// scrolls the page as usual.

import { listen } from "../../dom.js";

const DRAG_PIXELS_MIN = 4;
const WHEEL_FACTOR = 1.0018;

/**
 * @param {Element} element
 * @param {{pan: (pixels: number) => void, zoom: (factor: number, x: number) => void,
 *   click: (event: PointerEvent) => void}} meant
 * @returns {() => void}
 */
export function watchGestures(element, meant) {
  /** @type {Map<number, {x: number}>} */
  const pointers = new Map();
  let moved = 0;
  const place = (event) => event.clientX - element.getBoundingClientRect().left;

  const offs = [
    listen(
      element,
      "wheel",
      (event) => {
        event.preventDefault();
        const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
        const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
        if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) meant.pan(sideways * unit);
        else meant.zoom(WHEEL_FACTOR ** (-event.deltaY * unit * (event.ctrlKey ? 5 : 1)), place(event));
      },
      { passive: false },
    ),
    listen(element, "pointerdown", (event) => {
      if (event.button !== 0) return;
      pointers.set(event.pointerId, { x: place(event) });
      if (pointers.size === 1) moved = 0;
    }),
    listen(element, "pointermove", (event) => {
      const pointer = pointers.get(event.pointerId);
      if (pointer === undefined) return;
      const x = place(event);
      const by = x - pointer.x;
      if (pointers.size === 2) {
        const other = [...pointers].find(([id]) => id !== event.pointerId)[1];
        const before = Math.abs(pointer.x - other.x);
        const after = Math.abs(x - other.x);
        moved = Infinity;
        if (before > 8 && after > 8) meant.zoom(after / before, (x + other.x) / 2);
        meant.pan(-by / 2);
      } else {
        moved += Math.abs(by);
        if (moved < DRAG_PIXELS_MIN) return;
        // Capture only now: a click must reach its bar.
        if (!element.hasPointerCapture(event.pointerId)) element.setPointerCapture(event.pointerId);
        element.classList.add("is-dragged");
        meant.pan(-by);
      }
      pointer.x = x;
    }),
  ];
  for (const type of ["pointerup", "pointercancel"]) {
    offs.push(
      listen(element, type, (event) => {
        if (!pointers.delete(event.pointerId)) return;
        element.classList.remove("is-dragged");
        if (type === "pointerup" && moved < DRAG_PIXELS_MIN) meant.click(event);
      }),
    );
  }
  return () => offs.forEach((off) => off());
}
