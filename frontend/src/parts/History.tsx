import type { RunView, SampleView } from "../contract.ts"
import { Scale } from "../numbers.ts"
import { binName } from "../words.ts"

interface Props {
  history: SampleView["history"]
  bins: RunView["bins"]
}

/** The size of a sample's error over training. */
export function History({ history, bins }: Props) {
  const first = history[0]
  const last = history.at(-1)
  if (!first || !last) return <p class="small">Training never saw this sample.</p>
  const errors = history.map((one) => one.error)
  const high = Math.max(...errors) || 1
  const scale = new Scale(errors)
  const points = errors.map((error, i) => `${i + 0.5},${100 - (96 * error) / high}`)
  const words = `Its error was ${scale.plain(first.error)} in ${binName(bins, first.bin)} and ${scale.plain(last.error)} in ${binName(bins, last.bin)}.`
  return (
    <figure class="timeline history">
      <div class="plot">
        <svg
          viewBox={`0 0 ${history.length} 100`}
          preserveAspectRatio="none"
          role="img"
          aria-label={words}
        >
          <polyline points={points.join(" ")} />
        </svg>
      </div>
      <div class="axis small" aria-hidden="true">
        <span>{binName(bins, first.bin)}</span>
        <span>{binName(bins, last.bin)}</span>
      </div>
      <figcaption class="small">{words}</figcaption>
    </figure>
  )
}
