import { useState } from "preact/hooks"
import type { EvidenceCard } from "../contract.ts"
import { usePane } from "../context.ts"
import { suspectsCsv } from "../csv.ts"
import { PAGE, sentence } from "../load.ts"
import type { Source } from "../source/source.ts"
import { Failed } from "./Waiting.tsx"

/** The suspects as CSV: the server's own file, or one made here where there is no server. */
export function Save() {
  const { source } = usePane()
  const [failed, setFailed] = useState<string | null>(null)
  const link = source.link("suspects.csv", {})
  if (link)
    return (
      <a href={link} download="suspects.csv" data-testid="csv">
        Save as CSV
      </a>
    )
  const save = () => everything(source).then(download, (error) => setFailed(sentence(error)))
  return (
    <>
      <button type="button" class="quiet" onClick={save} data-testid="csv">
        Save as CSV
      </button>
      {failed && <Failed message={failed} />}
    </>
  )
}

async function everything(source: Source): Promise<EvidenceCard[]> {
  const samples: EvidenceCard[] = []
  for (;;) {
    const more = await source.get("suspects", { offset: samples.length, limit: PAGE })
    samples.push(...more.samples)
    if (samples.length >= more.total || more.samples.length === 0) return samples
  }
}

function download(samples: EvidenceCard[]): void {
  const url = URL.createObjectURL(new Blob([suspectsCsv(samples)], { type: "text/csv" }))
  const link = Object.assign(document.createElement("a"), { href: url, download: "suspects.csv" })
  link.click()
  URL.revokeObjectURL(url)
}
