/** A sentence whose `names` in backticks are written as code. */
export function Words({ text }: { text: string }) {
  const parts = text.split(/`([^`]+)`/)
  return <>{parts.map((part, i) => (i % 2 ? <code>{part}</code> : part))}</>
}
