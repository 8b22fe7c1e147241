import type { ComponentChildren } from "preact"
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks"

interface Props {
  total: number
  /** Pixels of one item along the way. */
  size: number
  across?: boolean
  label: string
  /** Which item is scrolled to at first. */
  start?: number
  onRange(first: number, last: number): void
  item(index: number): ComponentChildren
  testid?: string
}

const MARGIN = 6

/** A list of any length of which only what is seen is made. */
export function Virtual({ total, size, across, label, start, onRange, item, testid }: Props) {
  const box = useRef<HTMLDivElement>(null)
  const [[first, last], setRange] = useState<[number, number]>([0, 30])

  const measure = () => {
    const element = box.current
    if (!element) return
    const from = across ? element.scrollLeft : element.scrollTop
    const seen = across ? element.clientWidth : element.clientHeight
    setRange([
      Math.max(0, Math.floor(from / size) - MARGIN),
      Math.ceil((from + seen) / size) + MARGIN,
    ])
  }
  useLayoutEffect(() => {
    const element = box.current
    if (!element) return
    if (start) element[across ? "scrollLeft" : "scrollTop"] = Math.max(0, (start - 1) * size)
    const observer = new ResizeObserver(measure)
    observer.observe(element)
    return () => observer.disconnect()
  }, [])
  const end = Math.min(total - 1, last)
  useEffect(() => {
    if (end >= first) onRange(first, end)
  }, [first, end, onRange])

  const length = `${total * size}px`
  const shown = Array.from({ length: Math.max(0, end - first + 1) }, (_, i) => first + i)
  return (
    <div
      class={`virtual ${across ? "across" : "down"}`}
      ref={box}
      onScroll={measure}
      tabIndex={0}
      role="region"
      aria-label={label}
      data-testid={testid}
    >
      <ul style={across ? { width: length } : { height: length }}>
        {shown.map((index) => (
          <li
            key={index}
            style={{ [across ? "left" : "top"]: `${index * size}px` }}
            aria-setsize={total}
            aria-posinset={index + 1}
          >
            {item(index)}
          </li>
        ))}
      </ul>
    </div>
  )
}
