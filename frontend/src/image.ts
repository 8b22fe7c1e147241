// Pictures as a run takes them: raw bytes, height × width × channels, row by row.
import type { ImageSize } from "./contract.ts"

/** The query of the picture that a canvas of the run's size holds. */
export function imageQuery(pixels: Uint8ClampedArray, channels: number): string {
  return `image:${base64url(raw(pixels, channels))}`
}

/** From red, green, blue, opacity over black to the channels of the run. */
export function raw(pixels: Uint8ClampedArray, channels: number): Uint8Array {
  const bytes = new Uint8Array((pixels.length / 4) * channels)
  for (let i = 0; i < pixels.length / 4; i++) {
    const [r = 0, g = 0, b = 0, opacity = 0] = pixels.subarray(4 * i, 4 * i + 4)
    const color = [r, g, b].map((value) => (value * opacity) / 255)
    const gray = 0.299 * color[0]! + 0.587 * color[1]! + 0.114 * color[2]!
    const values = channels === 1 ? [gray] : [...color, opacity]
    for (let c = 0; c < channels; c++) bytes[i * channels + c] = Math.round(values[c] ?? 0)
  }
  return bytes
}

export function base64url(bytes: Uint8Array): string {
  let letters = ""
  for (const byte of bytes) letters += String.fromCharCode(byte)
  return btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "")
}

/** A picture from a file, fitted into the run's size with its proportions kept. */
export async function fitted(file: Blob, size: ImageSize): Promise<Uint8ClampedArray> {
  const bitmap = await createImageBitmap(file)
  const canvas = new OffscreenCanvas(size.width, size.height)
  const context = canvas.getContext("2d")!
  context.imageSmoothingQuality = "high"
  const factor = Math.min(size.width / bitmap.width, size.height / bitmap.height)
  const [width, height] = [bitmap.width * factor, bitmap.height * factor]
  context.drawImage(bitmap, (size.width - width) / 2, (size.height - height) / 2, width, height)
  return context.getImageData(0, 0, size.width, size.height).data
}
