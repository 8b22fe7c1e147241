// Tables for other programs, as the server writes them.
import type { EvidenceCard, Id } from "./contract.ts"

export function suspectsCsv(samples: readonly EvidenceCard[]): string {
  const rows = samples.map(({ id, label, value }) =>
    [field(id), field(label), String(value)].join(","),
  )
  return ["id,label,suspicion", ...rows, ""].join("\r\n")
}

function field(value: Id | null): string {
  const text = value === null ? "" : String(value)
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text
}
