/** A background between nothing and full color: blue for, orange against. */
export function heat(value: number, largest: number): { backgroundColor: string } | undefined {
  if (!largest || !value) return undefined
  const percent = Math.round(62 * Math.sqrt(Math.abs(value) / largest))
  const color = value > 0 ? "var(--for)" : "var(--against)"
  return { backgroundColor: `color-mix(in srgb, ${color} ${percent}%, transparent)` }
}
