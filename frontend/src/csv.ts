// Tables for other programs. A field that a spreadsheet would run as a formula is kept text.
import type { Evidence, Id } from "./api.ts"

export function suspectsCsv(samples: readonly Evidence[]): string {
  const rows = samples.map(({ id, label, value }) =>
    [field(id), field(label), String(value)].join(","),
  )
  return ["id,label,suspicion", ...rows, ""].join("\r\n")
}

function field(value: Id | null): string {
  const text = value === null ? "" : String(value)
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text
  return /[",\r\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe
}
