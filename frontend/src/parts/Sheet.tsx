import type { ComponentChildren } from "preact"
import { useEffect, useRef } from "preact/hooks"
import { useUnique } from "../unique.ts"

interface Props {
  title: string
  onClose(): void
  children: ComponentChildren
  testid?: string
}

/** A dialog over the page; the browser keeps the focus inside it, and Escape closes it. */
export function Sheet({ title, onClose, children, testid }: Props) {
  const dialog = useRef<HTMLDialogElement>(null)
  const id = useUnique()
  useEffect(() => {
    const element = dialog.current
    const opener = document.activeElement
    element?.showModal()
    return () => {
      element?.close()
      if (opener instanceof HTMLElement) opener.focus({ preventScroll: true })
    }
  }, [])
  const outside = (event: MouseEvent) => event.target === dialog.current && onClose()
  return (
    <dialog
      class="sheet"
      ref={dialog}
      aria-labelledby={id}
      onCancel={(event) => {
        event.preventDefault()
        onClose()
      }}
      onClick={outside}
      data-testid={testid}
    >
      <div class="inside">
        <header>
          <h2 id={id}>{title}</h2>
          <button type="button" class="quiet" onClick={onClose} data-testid="close">
            Close
          </button>
        </header>
        {children}
      </div>
    </dialog>
  )
}
