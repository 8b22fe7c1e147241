// Where the keyboard is, once what it was at is gone.
import type { RefObject } from "preact"
import { useEffect } from "preact/hooks"

/** Gives the focus to an element when the one that had it, somewhere around it, is taken away. */
export function useFocusKept(home: RefObject<HTMLElement | null>): void {
  useEffect(() => {
    const around = home.current?.parentElement
    if (!around) return
    let last: EventTarget | null = null
    const remember = (event: FocusEvent) => (last = event.target)
    const observer = new MutationObserver(() => {
      const gone = last instanceof Element && !last.isConnected
      if (!gone || document.activeElement !== document.body) return
      last = null
      home.current?.focus({ preventScroll: true })
    })
    around.addEventListener("focusin", remember)
    observer.observe(around, { childList: true, subtree: true })
    return () => {
      around.removeEventListener("focusin", remember)
      observer.disconnect()
    }
  }, [])
}
