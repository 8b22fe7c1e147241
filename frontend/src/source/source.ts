// The one seam between the page and whatever answers it: a server, a report's own data, a kernel.
import type { ViewName, Views } from "../contract.ts"

export type Value = string | number | readonly (string | number)[] | null | undefined
export type Params = Record<string, Value>

export interface Progress {
  progress: number
  doing: string
}

export interface Options {
  signal?: AbortSignal
  onProgress?: (news: Progress) => void
}

export interface Source {
  get<P extends ViewName>(path: P, params: Params, options?: Options): Promise<Views[P]>
  /** Whether it has an answer to this: a report has some only. */
  carries(path: ViewName, params: Params): boolean
  /** Where the same answer can be had as JSON, if it can. */
  link(path: string, params: Params): string | null
}

/** An answer in a sentence: asking again would not change it. */
export class Refusal extends Error {}

/** Nobody answered; asking again may help. */
export class Lost extends Error {}

/** Parameters in one order and without those that are not given. */
export function search(params: Params): URLSearchParams {
  const given = new URLSearchParams()
  for (const name of Object.keys(params).sort()) {
    const value = params[name]
    if (value === null || value === undefined || value === "") continue
    for (const one of Array.isArray(value) ? value : [value]) given.append(name, String(one))
  }
  return given
}
