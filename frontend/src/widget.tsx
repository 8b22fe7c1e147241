// A notebook's view, through anywidget: state and selection live in its model.
import { mount } from "./mount.tsx"
import { type Home, Route } from "./route.ts"
import { KernelSource, type Model } from "./source/kernel.ts"

function modelHome(model: Model): Home {
  return {
    read: () => String(model.get("state") ?? ""),
    write(hash) {
      model.set("state", hash)
      model.save_changes()
    },
    listen(changed) {
      model.on("change:state", changed)
      return () => model.off("change:state", changed)
    },
  }
}

/**
 * Keeps JupyterLab's shortcuts of plain keys away from what has the focus here: two d on a button would
 * delete the cell. It asks the focused element, before any listener inside the page is told.
 */
function ownKeys(el: HTMLElement): () => void {
  const mark = (event: KeyboardEvent) => {
    const { target, ctrlKey, metaKey, altKey } = event
    if (target instanceof Element && el.contains(target))
      target.toggleAttribute("data-lm-suppress-shortcuts", !ctrlKey && !metaKey && !altKey)
  }
  addEventListener("keydown", mark, true)
  return () => removeEventListener("keydown", mark, true)
}

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const sources: KernelSource[] = []
  const open = (run: number) => {
    const source = new KernelSource(model, run)
    sources.push(source)
    return source
  }
  el.classList.add("in-notebook")
  const release = ownKeys(el)
  let selected = ""
  const unmount = mount(el, {
    route: new Route(modelHome(model)),
    open,
    onState({ ticked }) {
      if (selected === ticked.join("\n")) return
      selected = ticked.join("\n")
      model.set("selection", ticked)
      model.save_changes()
    },
  })
  return () => {
    release()
    unmount()
    for (const source of sources) source.close()
  }
}

export default { render }
