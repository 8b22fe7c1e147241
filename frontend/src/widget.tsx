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

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  const sources: KernelSource[] = []
  const open = (run: number) => {
    const source = new KernelSource(model, run)
    sources.push(source)
    return source
  }
  el.classList.add("in-notebook")
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
    unmount()
    for (const source of sources) source.close()
  }
}

export default { render }
