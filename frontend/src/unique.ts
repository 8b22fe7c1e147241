import { useState } from "preact/hooks"

/** A name that no other part has, nor any other explorer in the same notebook. */
export function useUnique(): string {
  const [name] = useState(() => `dualform-${Math.random().toString(36).slice(2)}`)
  return name
}
