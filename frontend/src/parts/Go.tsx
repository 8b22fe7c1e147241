import type { ComponentChildren } from "preact"
import { useExplorer } from "../context.ts"
import type { State } from "../state.ts"

interface Props {
  to: Partial<State>
  children: ComponentChildren
  class?: string
  label?: string
  current?: boolean
  testid?: string
}

/** A link to another state: a real address, so that it opens in a new tab too. */
export function Go({ to, children, class: style, label, current, testid }: Props) {
  const { go, link } = useExplorer()
  const follow = (event: MouseEvent) => {
    if (event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return
    event.preventDefault()
    go(to)
  }
  return (
    <a
      class={style}
      href={link(to)}
      onClick={follow}
      aria-label={label}
      aria-current={current ? "page" : undefined}
      data-testid={testid}
    >
      {children}
    </a>
  )
}
