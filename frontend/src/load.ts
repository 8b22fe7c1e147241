// Asking a source from a component: cancelled when the question changes, remembered when answered.
import { useEffect, useReducer, useRef, useState } from "preact/hooks"
import type { ViewName, Views } from "./contract.ts"
import { Lost, type Params, type Progress, search, type Source } from "./source/source.ts"

export interface Loaded<T> {
  /** The answer; while a new one is being made, the last one. */
  value: T | null
  failed: string | null
  /** Nobody answered: it may be asked again. */
  lost: boolean
  busy: boolean
  progress: Progress | null
  cancelled: boolean
  cancel(): void
  again(): void
}

type Known = Omit<Loaded<unknown>, "cancel" | "again">

const IDLE: Known = {
  value: null,
  failed: null,
  lost: false,
  busy: false,
  progress: null,
  cancelled: false,
}
const REMEMBERED = 60
const answered = new WeakMap<Source, Map<string, unknown>>()

/** The answer to a question; a path of null asks nothing. */
export function useGet<P extends ViewName>(
  source: Source,
  path: P | null,
  params: Params,
): Loaded<Views[P]> {
  const key = path === null ? "" : `${path}?${search(params)}`
  const [known, setKnown] = useState<Known>({ ...IDLE, busy: path !== null })
  const [turn, again] = useReducer((n: number) => n + 1, 0)
  const abort = useRef<AbortController | null>(null)

  useEffect(() => {
    if (path === null) return setKnown(IDLE)
    const controller = new AbortController()
    abort.current = controller
    const remembered = memory(source).get(key)
    if (remembered !== undefined) return setKnown({ ...IDLE, value: remembered })
    setKnown((last) => ({ ...IDLE, value: last.value, busy: true }))
    const onProgress = (progress: Progress) => setKnown((last) => ({ ...last, progress }))
    source.get(path, params, { signal: controller.signal, onProgress }).then(
      (value) => {
        remember(source, key, value)
        if (!controller.signal.aborted) setKnown({ ...IDLE, value })
      },
      (error: unknown) => {
        if (!controller.signal.aborted)
          setKnown({ ...IDLE, failed: sentence(error), lost: error instanceof Lost })
      },
    )
    return () => controller.abort()
  }, [source, key, turn])

  const cancel = () => {
    abort.current?.abort()
    setKnown((last) => ({ ...IDLE, value: last.value, cancelled: true }))
  }
  return { ...known, value: known.value as Views[P] | null, cancel, again: () => again(0) }
}

export interface Pages<T> {
  total: number | null
  failed: string | null
  item(index: number): T | undefined
  /** Makes sure that the items of a range are there, or on their way. */
  need(first: number, last: number): void
}

export const PAGE = 50

/** A long list that is fetched as it is looked at. */
export function usePages<P extends ViewName, T>(
  source: Source,
  path: P,
  params: Params,
  items: (answer: Views[P]) => { total: number; items: T[] },
): Pages<T> {
  const key = `${path}?${search(params)}`
  const [, redraw] = useReducer((n: number) => n + 1, 0)
  const list = useRef(new List<T>(""))
  if (list.current.key !== key) {
    list.current.abort.abort()
    list.current = new List<T>(key)
  }
  const now = list.current
  useEffect(() => () => list.current.abort.abort(), [])

  const fetchPage = (page: number) => {
    if (now.asked.has(page)) return
    now.asked.add(page)
    const wanted = { ...params, offset: page * PAGE, limit: PAGE }
    source.get(path, wanted, { signal: now.abort.signal }).then(
      (answer) => {
        const got = items(answer)
        now.total = got.total
        now.pages.set(page, got.items)
        if (list.current === now) redraw(0)
      },
      (error: unknown) => {
        now.failed = sentence(error)
        if (list.current === now && !now.abort.signal.aborted) redraw(0)
      },
    )
  }
  useEffect(() => fetchPage(0), [key])
  return {
    total: now.total,
    failed: now.failed,
    item: (index) => now.pages.get(Math.floor(index / PAGE))?.[index % PAGE],
    need: (first, last) => {
      for (let page = Math.floor(first / PAGE); page <= Math.floor(last / PAGE); page++)
        if (now.total === null || page * PAGE < now.total) fetchPage(page)
    },
  }
}

class List<T> {
  readonly key: string
  readonly pages = new Map<number, T[]>()
  readonly asked = new Set<number>()
  readonly abort = new AbortController()
  total: number | null = null
  failed: string | null = null

  constructor(key: string) {
    this.key = key
  }
}

function memory(source: Source): Map<string, unknown> {
  let known = answered.get(source)
  if (!known) answered.set(source, (known = new Map()))
  return known
}

/** The oldest is dropped first. */
function remember(source: Source, key: string, value: unknown): void {
  const known = memory(source)
  known.set(key, value)
  const oldest = known.keys().next().value
  if (known.size > REMEMBERED && oldest !== undefined) known.delete(oldest)
}

export function sentence(error: unknown): string {
  return error instanceof Error ? error.message : String(error)
}
