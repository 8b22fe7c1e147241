import { render } from "preact"
import { App } from "./app.tsx"
import type { Route } from "./route.ts"
import type { Source } from "./source/source.ts"
import type { State } from "./state.ts"
import "./styles/index.css"

interface Mounted {
  route: Route
  open(run: number): Source
  onState?(state: State): void
}

/** Puts an explorer into an element; what it returns takes it out again. */
export function mount(element: HTMLElement, { route, open, onState }: Mounted): () => void {
  element.replaceChildren()
  element.classList.add("dualform")
  const watch = (state: State) => {
    element.dataset.theme = state.theme
    onState?.(state)
  }
  watch(route.state)
  render(<App route={route} open={open} onState={watch} />, element)
  return () => render(null, element)
}
