import type { ComponentChildren } from "preact"
import type { Params, Source } from "../source/source.ts"
import { useUnique } from "../unique.ts"

interface Props {
  title: string
  children: ComponentChildren
  /** The same as JSON: who answers, and what is asked. */
  twin?: { source: Source; path: string; params: Params }
  aside?: ComponentChildren
  testid?: string
}

/** A titled part of a page, with the link to its JSON twin. */
export function Section({ title, children, twin, aside, testid }: Props) {
  const id = useUnique()
  const link = twin?.source.link(twin.path, twin.params) ?? null
  return (
    <section class="section" aria-labelledby={id} data-testid={testid}>
      <header>
        <h2 id={id}>{title}</h2>
        {aside}
        {link && (
          <a
            class="twin"
            href={link}
            target="_blank"
            rel="noreferrer"
            aria-label={`${title} as JSON`}
          >
            JSON
          </a>
        )}
      </header>
      {children}
    </section>
  )
}
